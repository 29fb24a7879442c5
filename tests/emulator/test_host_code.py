"""Host code in a kernel is refused, as nvcc refuses it; what nvcc takes is let through."""

import pytest

from helpers.emulator.host_code import refuse
from helpers.emulator.launcher import INCLUDE
from helpers.emulator.translate import TranslationError
from helpers.ladder.paths import INCLUDE as KERNEL_INCLUDE
from helpers.ladder.paths import ROOT


def refused(text: str) -> str:
    try:
        refuse(text, "reader.cu", [INCLUDE, KERNEL_INCLUDE])
    except TranslationError as error:
        return str(error)
    return ""


HOST = "static float scaled(float s, float by) { return s * by; }\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HOST + "__global__ void scores(float *s) {\n  s[0] = 2 * scaled(s[1], 3); }",
            "reader.cu:3: scaled is host code, which the kernel scores can't run: write __device__ before it",
        ),
        (
            HOST + "template <int d> __device__ __forceinline__ float f(float s) { return scaled(s, d); }",
            "reader.cu:2: scaled is host code, which the function f can't run",
        ),
        ("template <class T> T twice(T x) { return x * 2; }\n__global__ void k(int *s) { s[0] = twice(s[0]); }", "twice is host"),
        ("namespace n { int f(int); __global__ void k(int *s) { if (s[0] == 0) s[0] = f(1); } }", "f is host code"),
        (
            "#if A\nint a;\n#endif\nstruct S { int x = {}; } s = {1};\nenum E { one };\nint f() { return 1; }\n"
            'extern "C" { __global__ void __launch_bounds__(128, 2) k(int *s) { auto g = [=] { return f(); }; s[0] = g(); } }',
            "reader.cu:7: f is host code, which the kernel k",
        ),
        ("__global__ void k(int *s) {\n  if (s[0]) throw 1; }", "reader.cu:2: 'throw' is host code, which the kernel k"),
        ("__global__ void k(int *s) { std::vector<int> v(3); }", "std::vector is host code"),
        ("__global__ void k(int *s) { usleep(3); }", "usleep is host code"),
    ],
)  # fmt: skip
def test_host_code_in_a_kernel_is_refused(text, message):
    assert message in refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "constexpr int f(int x) { return x; } __global__ void k(int *s) { s[0] = f(1); }",
        "__device__ int f(int x); int f(int x) { return x; } __global__ void k(int *s) { s[0] = f(1); }",
        "__device__ int f(int x) { return x; } int f(float x) { return x; } __global__ void k(int *s) { s[0] = f(1); }",
        "#define BOTH __host__ __device__\nBOTH int f(int x) { return x; } __global__ void k(int *s) { s[0] = f(1); }",
        "HD int f(int x) { return x; } __global__ void k(int *s) { s[0] = f(1); }",
        "#ifdef A\n__device__\n#endif\nint f(int x) { return x; } __global__ void k(int *s) { s[0] = 1; }",
        "int f(int x) { return x; }\n#ifdef A\n__global__ void k(int *s) { s[0] = f(1); }\n#endif",
        "#ifdef A\n__device__ int f(int x) {\n#else\nint f(int x) {\n#endif\n return x; } __global__ void k(int *s) { s[0] = f(1); }",
        "int f(int x) { return x; } __global__ void k(int *s) { auto f = [](int x) { return x; }; s[0] = f(1); }",
        "int f(int x) { return x; } template <class F> __global__ void k(int *s, F f) { s[0] = f(1); }",
        "int f(int x) { return x; } struct F {}; __global__ void k(int *s) { F f(1); }",
        "int f(int x) { return x; } __global__ void k(int *s) { s[0] = sizeof(f(1)); decltype(f(1)) x; s->f(1); n::f(2); }",
        "int f(int x) { return x; } __host__ __device__ int g() { return f(1); } void launch() { k<<<f(1), f(2)>>>(f(3)); }",
        "struct F { int x; __device__ int f(int y) const { return y; } }; int S::f(int x) { return x; }\n"
        "__global__ void k(F g, int *s) { s[0] = g.f(1); f(2); }",
        "auto f = [] __device__(int x) { return x; }; __global__ void k(int *s) { s[0] = f(1); }",
        "__device__ int rand(int x) { return x; } __global__ void k(int *s) { s[0] = rand(1); }",
        "float rsqrtf(float x) { return 1 / x; } __global__ void k(float *s) { s[0] = rsqrtf(1); }",  # CUDA's
        "int f(int x) { return x; }\n#define F(x) f(x)\n__global__ void k(int *s) { s[0] = 1; }",
        "__global__ void k(int *s) { s[0] = std::max(s[0], 1); }",  # constexpr
        'void f() { throw 1; printf("x"); std::vector<int> v; }',
    ],
)
def test_what_might_be_right_passes(text):
    assert refused(text) == ""


def test_no_kernel_of_the_project_has_host_code():
    for path in sorted((ROOT / "kernels").rglob("*.cu")):
        assert refused(path.read_text()) == "", path

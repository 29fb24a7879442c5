"""CUDA's own syntax becomes C++, and every line stays where it was."""

import pytest

from helpers.emulator.translate import TranslationError, tokens, translate, unit


@pytest.mark.parametrize(
    ("cuda", "kernel", "shape"),
    [
        ("k<<<1, 32>>>(a);", "k", "1, 32"),
        ("k<64, D><<<grid, block, bytes, stream>>>(a);", "k<64, D>", "grid, block, bytes, stream"),
        ("fa::k<(D > 64), T<2>><<<g, b>>>(a);", "fa::k<(D > 64), T<2>>", "g, b"),
        ("k<<<dim3(f(1), 2), Tile<d>::threads>>>(a);", "k", "dim3(f(1), 2), Tile<d>::threads"),
        ("table[i]<<<1, 1>>>(a);", "table[i]", "1, 1"),
        ("k<<<1 << 3, 1>>>(a);", "k", "1 << 3, 1"),
        ("(k)<<<1, 1>>>(a);", "(k)", "1, 1"),
    ],
)
def test_launch(cuda, kernel, shape):
    assert f", {kernel}, ::emu::Shape({shape}))(a);" in translate(cuda)


@pytest.mark.parametrize(
    ("declaration", "kernel", "called"),
    [
        ("template <class T> __global__ void k(T x);", "k", True),
        ("template <class T> __global__ void k(T x);", "ns::k", True),
        ("template <int d, class T> __global__ __launch_bounds__(d) void k(T x);", "k<64>", True),
        ("template <int d, class T> __global__ void k(T x);", "k<64, Pair<A, B>>", False),
        ("template <int d, bool b = false> __global__ void k(float x);", "k<64>", False),
        ("template <int d = 64> __global__ void k(float x);", "k", True),
        ("__global__ void k(float x, int n = 3);", "k", True),
        ("template <int d> __global__ void k(std::enable_if_t<(d >= 64)> x);", "k<64>", False),
        ("template <int d, bool b = d < 64> __global__ void k(float x);", "k<64>", True),
    ],
)
def test_a_launch_that_leaves_arguments_out_calls_the_kernel(declaration, kernel, called):
    said = f"[=](const auto &...emu_p) {{ {kernel}(emu_p...); }}" if called else kernel
    assert f", {said}, ::emu::Shape(1, 2))(x);" in translate(f"{declaration} void f() {{ {kernel}<<<1, 2>>>(x); }}")


def test_nested_template_arguments_are_no_launch():
    text = "std::vector<std::vector<std::vector<int>>> v; int y = x >>3 << 2;"
    assert translate(text) == text


@pytest.mark.parametrize(
    ("parameters", "references"),
    [
        ("int n, const __grid_constant__ Maps maps", "int n, const Maps &maps"),
        ("__grid_constant__ const Pair<A, (B > 2)> pair, int n", "const Pair<A, (B > 2)> &pair, int n"),
        ("Maps const __grid_constant__ maps", "Maps const &maps"),
        ("const __grid_constant__ typename T::Maps maps", "const typename T::Maps &maps"),
        ("const __grid_constant__ Maps", "const Maps &"),
        ("const __grid_constant__ typename T::Maps, int", "const typename T::Maps &, int"),
        ("const Maps __grid_constant__, int", "const Maps &, int"),
    ],
)
def test_a_grid_constant_is_taken_by_reference(parameters, references):
    assert "".join(translate(f"void k({parameters});").split()) == "".join(f"void k({references});".split())


def test_a_grid_constant_outside_of_parentheses_is_refused():
    with pytest.raises(TranslationError, match="must stand in the declaration of a kernel's parameter"):
        translate("const __grid_constant__ int n;")


@pytest.mark.parametrize(
    ("declaration", "names"),
    [
        ("__shared__ float x;", "x"),
        ("__shared__ float a[32][33], b[4], c;", "a b c"),
        ("__shared__ int a, b[4], c;", "a b c"),
        ("static __shared__ alignas(16) half a[D];", "a"),
        ("__align__(128) __shared__ Pair<int, (1 > 2)> p[2];", "p"),
        ("__shared__ typename T::Storage storage;", "storage"),
        ("__shared__ union { float f[2]; int i; } u;", "u"),
        ("volatile __shared__ int flag;", "flag"),
        ("[[maybe_unused]] __shared__ float a[2];", "a"),
        ("__shared__ float a[4], *b, **const c, d;", "a b c d"),
        ("__shared__ float *a, b;", "a b"),
        ("__shared__ float a[D >= 64 && !(D == 96) ? 1 : 2], b[N<<1];", "a b"),
    ],
)
def test_shared_declaration_names_its_variables(declaration, names):
    text = translate(f"void f() {{ {declaration} }}")
    assert [word.split(" ")[0] for word in text.split("auto& ")[1:]] == names.split()
    assert "__shared__" not in text and "> =" not in text and "= =" not in text and "& &" not in text


def test_dynamic_shared_is_a_reference_of_unknown_length():
    text = translate("void f() { extern __shared__ __align__(1024) unsigned char smem[]; }")
    assert 'unsigned char (&smem) [ ] = ::emu::dynamic_array<unsigned char [ ]>("smem")' in text


@pytest.mark.parametrize(
    "text", ["__shared__ int x;", "namespace n { __shared__ int x; }", "struct S { __shared__ int x; };"]
)
def test_shared_outside_of_a_function_is_refused(text):
    with pytest.raises(TranslationError, match="inside functions only"):
        translate(text)


def test_shared_in_a_method_of_a_class_in_a_namespace():
    assert "emu_shared_1" in translate("namespace n { struct S { void f() const { __shared__ int x; } }; }")


def test_shared_in_a_kernel_with_c_linkage():
    assert "emu_shared_1" in translate('extern "C" __global__ void k(int n) { __shared__ int x; }')
    assert "emu_shared_1" in translate('extern "C" { __global__ void k(int n) { __shared__ int x; } }')
    with pytest.raises(TranslationError, match="inside functions only"):
        translate('extern "C" { __shared__ int x; }')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("void f() { __shared__ int x = 3; }", "initialised"),
        ("#define SHARED __shared__", "only with the variable that it declares"),
        ("void f() {\n  extern __shared__ int x; }", "array of unknown length"),
        ("void f() { k<<<1, 2(a); }", "no '>>>'"),
        ("void f() { <<<1, 2>>>(a); }", "name of a kernel"),
        ("__global__ void __cluster_dims__(2, 1, 1) k() {}", "no clusters"),
        ("__managed__ int x;", "no memory that host and kernels share"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_in_words(text, words):
    with pytest.raises(TranslationError, match=words):
        translate(text)


def test_strings_comments_and_directives_are_left_alone():
    text = '#pragma unroll\nauto s = "k<<<1, 2>>>(x)"; // __shared__ int x;\n/* asm("") */ char c = \'"\'; auto r = R"(asm())";\n'
    assert translate(text) == text


def test_shared_in_a_macro_that_stands_in_a_function():
    text = translate("#define ROW(n) __shared__ float s[n]\nvoid f() { __shared__ int a; ROW(4); }")
    assert "struct emu_shared_ROW1 { float s[n]; }; auto& s" in text and "struct emu_shared_1 { int a; }" in text
    with pytest.raises(TranslationError, match="initialised") as caught:
        translate("int x;\n#define ROW __shared__ int s = 3\n")
    assert caught.value.line == 2


def test_macro_bodies_are_translated():
    assert "::emu::Shape" in translate("#define GO(k) \\\n  k<<<1, 2>>>(3)\n")


def test_functions_of_the_c_library_that_the_runtime_must_see():
    assert translate('printf("x"); a.printf(); n::printf();') == '::emu::print("x"); a.printf(); n::printf();'
    assert translate("std::memcpy(a, b, 4);") == "::emu::__tsan_memcpy(a, b, 4);"


def test_lines_stay_where_they_were():
    text = """// first
template <int D> __global__ void k() {
  __shared__ float a[2],
      b[D];
  asm volatile("mma.sync"
               : "=r"(x)
               : "r"(y));
  mark();
}
void f() { k<64><<<1,
    32>>>(); mark(); }
"""
    out = translate(text)
    where = [[i for i, line in enumerate(t.split("\n")) if "mark()" in line] for t in (text, out)]
    assert where[0] == where[1] == [7, 10]
    assert text.count("\n") == out.count("\n")


def test_tokens_give_the_text_back():
    text = 'a<<<b>>>c \t\\\n // x\n#if 1\n\'\\\'\'"\\"" 0x1.8p-3f 1\'000 L"ü"\n'
    assert "".join(t.text for t in tokens(text)) == text


def test_headers_are_written_in_place_once_with_their_own_lines(tmp_path):
    (tmp_path / "fa").mkdir()
    (tmp_path / "fa" / "one.cuh").write_text("#pragma once\n#include <fa/two.cuh>\nint one;\n")
    (tmp_path / "fa" / "two.cuh").write_text("#pragma once\nint two;\n")
    text = unit("int zero;\n#include <fa/one.cuh>\n#include <fa/two.cuh>\nint three;\n", "reader.cu", tmp_path)
    assert text.count("int two;") == 1 and "pragma once" not in text
    file, line, places = "", 0, {}
    for row in text.split("\n"):
        if row.startswith("#line"):
            _, number, name = row.split(" ")
            file, line = name.strip('"').rsplit("/", 1)[-1], int(number)
            continue
        places[row] = (file, line)
        line += 1
    assert places["int zero;"] == ("reader.cu", 1) and places["int three;"] == ("reader.cu", 4)
    assert places["int one;"] == ("one.cuh", 3) and places["int two;"] == ("two.cuh", 2)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("K_full + 8 * s", "K_full"),
        ("smem + C::Q_full + 8 * stage", "Q_full"),
        ("Q_empty", "Q_empty"),
        ("8 * s + full", "full"),
        ("smem + 8 * s", None),
        ("fa::smem_address(&full[s])", None),
        ("Tile<d, 2>::Q_full + 8 * s", None),
        ("a < b ? x : y", None),
    ],
)
def test_an_mbarrier_gets_the_name_of_its_address(address, name):
    call = f"fa::mbarrier_init({address}, 1);"
    asked = f'fa::mbarrier_init(::emu::named_mbarrier("{name}", {address}), 1);'
    assert translate(call) == (asked if name else call)


def test_a_function_that_initialises_mbarriers_is_left_alone():
    declaration = "__device__ void mbarrier_init(uint32_t barrier, uint32_t count) {}"
    assert translate(declaration) == declaration

"""What a compiler says is told in the reader's terms: CUDA's own names, and none of the emulator's."""

import pytest
from emulated import FILE, build, line_of, program

from helpers.emulator.hints import explained
from helpers.ladder.errors import CompileError


@pytest.fixture(scope="module")
def said() -> tuple[str, str]:
    """A source with a mistake a line, and what comes of them."""
    before = """
    __device__ float twice(float x) { if (x > 1) return 2 * x; } // no return
    template <class T> __device__ T half_turns(T x) { return x * cospif(1.0f); } // in a template
    """
    body = "out[0] = sinpif(in[0]); // not there\nout[1] = __fmul_rz(in[0], twice(2)) + umni(1, 2); // misspelt\n"
    body += "atomicAdd(reinterpret_cast<float2*>(out), make_float2(1, 2)); // a vector"
    launches = "cudaEvent_t e; cudaEventCreate(&e); // API\nkernel<<<1, 32>>>(a, 1); // arguments\noutput<<<1, 32>>>(a); // output"
    source = program(body, before=before, launch=launches)
    with pytest.raises(CompileError) as caught:
        build(source).compile()
    return source, str(caught.value)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("// not there", "sinpif"),
        ("// in a template", "cospif"),
        ("// misspelt", "umin"),  # what was meant
        ("// a vector", "the emulator has no atomicAdd of a vector: add its members one by one"),
        ("// API", "cudaEventCreate"),
        ("// arguments", "the launch's arguments are not those that the kernel takes"),
        ("// output", "output"),
    ],
)
def test_a_mistake_is_told_at_its_line(mark, words, said):
    source, told = said
    assert any(line.startswith(f"{FILE}:{line_of(source, mark)}:") and words in line for line in told.splitlines())


def test_what_needs_a_gpu_is_named(said):
    _, told = said
    assert "\nCUDA has cospif, sinpif, __fmul_rz; the emulator has not: that needs a GPU" in told
    assert "\ncudaEventCreate: of CUDA's API the emulator has only a part; unless misspelt, that needs a GPU" in told


def test_nothing_is_told_of_the_emulators_insides(said):
    assert "emu::" not in said[1] and "emulator/include" not in said[1]


def test_a_missing_return_is_an_error():
    source = program(
        "out[0] = twice(2);", before="__device__ float twice(float x) { if (x > 1) return 2 * x; } // here"
    )
    with pytest.raises(CompileError, match=rf"{FILE}:{line_of(source)}:.*non-void function.*return-type"):
        build(source).compile()


@pytest.mark.parametrize(
    "words",
    [
        "cell:9:5: error: ‘NAME’ was not declared in this scope; did you mean ‘fmin’?",
        "cell:9:5: error: 'NAME' was not declared in this scope",
        "cell:9:5: error: ‘NAME’ was not declared in this scope, and no declarations were found by argument-dependent lookup",
        "cell:9:5: error: there are no arguments to ‘NAME’ that depend on a template parameter, so a declaration of ‘NAME’ must be available",
        "cell:9:5: error: use of undeclared identifier 'NAME'; did you mean 'fmin'?",
        "cell:9:5: error: call to function 'NAME' that is neither visible in the template definition nor found",
    ],
)  # fmt: skip
def test_each_compilers_words_are_understood(words):
    for name in ("__vadd4", "__fadd_rz", "__half2ll_rd", "normcdff", "__isShared", "tex2D", "__vimax3_s32"):
        told = explained(words.replace("NAME", name))
        assert f"CUDA has {name}; the emulator has not" in told and "fmin" not in told
    for name in ("cudaEvent_t", "cuLaunchKernel"):
        assert f"\n{name}: of CUDA's API" in explained(words.replace("NAME", name))
    for name in ("__synchthreads", "norm", "cuda_x", "scores"):
        assert explained(words.replace("NAME", name)) == words.replace("NAME", name)

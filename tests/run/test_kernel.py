"""The contract of a call: what is refused, in words that name what came and what is allowed."""

import ctypes
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from emulated import build

from helpers import CallError, Kernel, KernelError, load, rung, xray
from helpers.ladder.contract import FaArgs, _dtype_code
from helpers.run.kernel import default_device, summary

Q = (2, 3, 40, 64)


@pytest.fixture(scope="module")
def fa1() -> Kernel:
    return load("03_fa1_fp32", device="cpu", quiet=True)


@pytest.fixture(scope="module")
def softmax() -> Kernel:
    return load("02_online_softmax", device="cpu", quiet=True)


def qkv(*shapes, **options) -> list[torch.Tensor]:
    return [torch.randn(shape, **options) for shape in (shapes or (Q, Q, Q))]


def test_struct_and_dtypes_are_those_the_kernels_see():
    """Each field's offset and size, as the C++ compiler lays fa_args out, and the numbers of fa_dtype."""
    fields = [name for name, *_ in FaArgs._fields_]
    numbers = ", ".join(f"offsetof(fa_args, {f}), sizeof(fa_args::{f})" for f in fields)
    launcher = 'extern "C" cudaError_t fa_launch(const fa_args*, cudaStream_t) { return cudaSuccess; }'
    source = f"""#include <fa/args.cuh>
extern "C" const size_t layout[] = {{{numbers}, sizeof(fa_args)}};
extern "C" const int dtypes[] = {{FA_FP32, FA_FP16, FA_BF16}};
{launcher}"""
    (built,) = build(source).compile_traced()
    library = ctypes.CDLL(str(built.path))
    layout = list((ctypes.c_size_t * (2 * len(fields) + 1)).in_dll(library, "layout"))
    ours = [n for f in fields for n in (getattr(FaArgs, f).offset, getattr(FaArgs, f).size)]
    assert layout == [*ours, ctypes.sizeof(FaArgs)]
    assert list((ctypes.c_int * 3).in_dll(library, "dtypes")) == [
        _dtype_code(torch.empty(1, dtype=dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]


def test_one_call_gives_o_and_lse(fa1):
    q, k, v = qkv(Q, (2, 3, 70, 64), (2, 3, 70, 64))
    o, lse = fa1(q, k, v)
    assert (o.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_scale_defaults_to_one_over_sqrt_d(fa1):
    q, k, v = qkv()
    assert torch.equal(fa1(q, k, v)[0], fa1(q, k, v, scale=1 / 8)[0])
    assert not torch.allclose(fa1(q, k, v)[0], fa1(q, k, v, scale=1)[0])


def test_strided_rows_give_the_same_answer(fa1):
    """(B, N, H, D) in memory, seen as (B, H, N, D)."""
    q, k, v = qkv()
    there = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    out = torch.empty_like(there[0]), torch.empty(Q[:3])
    assert not there[0].is_contiguous() and not out[0].is_contiguous()
    o, lse = fa1(*there, out=out)
    assert o is out[0] and lse is out[1]
    assert torch.equal(o, fa1(q, k, v)[0])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (lambda: qkv()[:2], "takes q, k, v; got 2"),
        (lambda: [[1.0], *qkv()[1:]], "q is a list; 03_fa1_fp32 takes torch tensors"),
        (lambda: qkv(dtype=torch.float64), "q is torch.float64; 03_fa1_fp32 takes float32"),
        (lambda: [qkv()[0], *qkv(dtype=torch.float16)[1:]], "k is torch.float16; 03_fa1_fp32 takes float32"),
        (lambda: qkv(device="meta"), r"q is on meta, 03_fa1_fp32 was loaded for cpu: pass q\.cpu\(\)"),
        (lambda: qkv(Q[1:], Q[1:], Q[1:]), r"q has shape \(3, 40, 64\); 03_fa1_fp32 takes four dimensions"),
        (lambda: qkv(Q, (2, 3, 0, 64), (2, 3, 0, 64)), r"k has shape \(2, 3, 0, 64\), which is empty"),
        (lambda: qkv((0, 3, 40, 64), Q, Q), "q has shape .*, which is empty"),
        (lambda: qkv(Q, Q, (2, 3, 41, 64)), r"k has shape \(2, 3, 40, 64\) and v \(2, 3, 41, 64\)"),
        (lambda: qkv((2, 4, 40, 64), Q, Q), r"batch, heads and head dimension have to agree \(k: \(2, 4, any, 64\)\)"),
        (lambda: qkv(Q, (2, 3, 40, 32), (2, 3, 40, 32)), "head dimension have to agree"),
        (lambda: qkv(*[(2, 3, 40, 48)] * 3), "head dimension 48: 03_fa1_fp32 takes D in 32, 64, 128"),
        (
            lambda: [t.mT for t in qkv(*[(2, 3, 64, 64)] * 3)],
            r"q has strides .*; the last has to be 1: q.contiguous\(\)",
        ),
        (
            lambda: [torch.randn(2, 3, 40, 66)[..., :64], *qkv()[1:]],
            "has strides of .* bytes; 03_fa1_fp32 reads 16 bytes",
        ),
        (lambda: [torch.randn(2 * 3 * 40 * 64 + 1)[1:].view(Q), *qkv()[1:]], "starts at address 4 modulo 16"),
    ],
)
def test_a_wrong_input_is_refused_by_name(fa1, inputs, words):
    with pytest.raises(ValueError, match=words):
        fa1(*inputs())


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e39, -3e38])  # kernels multiply by log2(e)
def test_a_scale_that_is_no_number_is_refused(fa1, scale):
    with pytest.raises(ValueError, match="has to be finite"):
        fa1(*qkv(), scale=scale)
    with pytest.raises(ValueError, match="scale is 'x'; it has to be a number"):
        fa1(*qkv(), scale="x")


def test_an_output_in_the_memory_of_an_input_is_refused(fa1):
    q, k, v = qkv()
    with pytest.raises(ValueError, match="out: o lies in the memory of an input; it has to have its own"):
        fa1(q, k, v, out=(q, torch.empty(Q[:3])))


def test_outputs_of_another_shape_or_type_are_refused(fa1):
    o, lse = torch.empty(Q), torch.empty(Q[:3])
    with pytest.raises(ValueError, match=r"out: o is torch.float32 \(3, 40, 64\) on cpu; it has to be"):
        fa1(*qkv(), out=(o[0], lse))
    with pytest.raises(ValueError, match=r"out: lse is torch.float64"):
        fa1(*qkv(), out=(o, lse.double()))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda o, lse: o, "out takes two tensors; got Tensor"),
        (lambda o, lse: (None, lse), "out: o is a NoneType; out takes tensors"),
        (lambda o, lse: (o[:, :, :1].expand(o.shape), lse), "out: o has strides .*; its elements have to have places"),
        (lambda o, lse: (o, lse.mT.contiguous().mT), "out: lse has strides .*contiguous"),
    ],
)
def test_outputs_that_can_not_hold_the_result_are_refused(fa1, out, words):
    with pytest.raises(ValueError, match=words):
        fa1(
            *qkv((1, 3, 40, 64), (1, 3, 40, 64), (1, 3, 40, 64)),
            out=out(torch.empty(1, 3, 40, 64), torch.empty(1, 3, 40)),
        )


def test_a_gradient_is_not_lost_in_silence(fa1):
    q, k, v = qkv(requires_grad=True)
    with pytest.raises(ValueError, match=r"q asks for a gradient, and 03_fa1_fp32 has no backward: pass q\.detach\(\)"):
        fa1(q, k, v)
    with torch.no_grad():
        assert fa1(q, k, v)[0].isfinite().all()


def test_softmax_takes_rows_of_any_shape(softmax):
    s = torch.randn(2, 3, 5, 77)
    p, lse = softmax(s)
    torch.testing.assert_close(p, torch.softmax(s, -1))
    torch.testing.assert_close(lse, torch.logsumexp(s, -1))
    assert softmax(s[0, 0, 0])[1].shape == ()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda k: k(torch.randn(4, 8), torch.randn(4, 8)), "takes one tensor of scores s; got 2"),
        (lambda k: k(torch.randn(8, 4).T), r"it has to be contiguous: s.contiguous\(\)"),
        (lambda k: k(torch.empty(4, 0)), r"s has shape \(4, 0\)"),
        (lambda k: k(torch.tensor(1.0)), r"s has shape \(\)"),
        (lambda k: k(torch.randn(4, 8), scale=2.0), "takes no scale"),
    ],
)
def test_softmax_refuses_by_name(softmax, call, words):
    with pytest.raises(ValueError, match=words):
        call(softmax)


def test_load_takes_one_of_stem_path_and_source(tmp_path):
    naive = rung("01_naive")
    (tmp_path / "mine.cu").write_text(naive.source.replace("// 01_naive:", "// mine:"))
    q, k, v = qkv()
    expected = load("01_naive", device="cpu", quiet=True)(q, k, v)[0]
    for kernel in (
        load(tmp_path / "mine.cu", device="cpu", quiet=True),
        load(source=naive.source, device="cpu", quiet=True),
        load(naive.source, device="cpu", quiet=True),
    ):
        assert torch.equal(kernel(q, k, v)[0], expected)
    with pytest.raises(ValueError, match="either a kernel .* or source="):
        load()
    with pytest.raises(ValueError, match="either a kernel .* or source="):
        load("01_naive", source=naive.source)
    with pytest.raises(ValueError, match="the text of a .cu; got int"):
        load(source=5)
    with pytest.raises(ValueError, match="device 'tpu': allowed are 'cuda' .* and 'cpu'"):
        load("01_naive", device="tpu")


def test_the_xray_takes_a_text_as_load_does():
    naive, inputs = rung("01_naive"), qkv()
    assert xray(naive.source, *inputs).to_frame().equals(xray("01_naive", *inputs).to_frame())


def test_a_source_without_a_launcher_is_refused_by_name():
    with pytest.raises(KernelError, match='no `extern "C" cudaError_t fa_launch'):
        load(source="#include <fa/args.cuh>\n__global__ void k() {}\n", device="cpu", quiet=True)


def test_one_line_after_a_build(capsys, cache):
    load("01_naive", device="cpu")
    load("01_naive", device="cpu")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("01_naive · emulator · compiled, ") and second.startswith(
        "01_naive · emulator · unchanged, "
    )


def test_the_line_has_spilled_bytes_stored_and_loaded_and_kilobytes_of_1024():
    resources = pd.DataFrame([{"registers": 40, "spill_store_bytes": 4, "spill_load_bytes": 8, "smem_bytes": 2048}])
    launcher = SimpleNamespace(backend="nvcc", cached=True, resources=resources)
    line = summary(SimpleNamespace(rung=rung("04"), launcher=launcher, seconds=0.0))
    assert line.endswith("40 registers, 12 bytes spilled, 2 KB static shared memory")


def test_nvcc_is_given_the_tiles_that_were_recorded_as_fastest(monkeypatch):
    monkeypatch.setattr("helpers.record.tiles.definition", lambda rung: f"those of {rung.stem}")
    monkeypatch.setattr("helpers.toolchain.nvcc.Launcher", lambda rung, tiles="": tiles)
    assert Kernel(rung("13"), "cuda").launcher == "those of 13_tuned"


@pytest.mark.parametrize(("there", "said"), [(True, "its driver is too old"), (False, "")])
def test_why_a_gpu_is_not_used_is_said_where_there_is_one(monkeypatch, there, said):
    monkeypatch.setattr("helpers.run.kernel.cuda_refusal", lambda rung: "its driver is too old")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert default_device(rung("04")) == ("cpu", said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_cuda_without_a_gpu_is_one_sentence():
    with pytest.raises(RuntimeError, match="no GPU found|built without CUDA"):
        load("01_naive", device="cuda")


def test_an_error_of_the_launch_has_cudas_text_and_the_next_call_works():
    naive = rung("01_naive")
    launch = naive.source[naive.source.index('extern "C" cudaError_t fa_launch') :]
    head = launch[: launch.index("{") + 1]
    broken = naive.replace(head, head + " if (args->Nq == 1) return cudaErrorInvalidConfiguration;")
    kernel = load(source=broken, device="cpu", quiet=True)
    q, k, v = qkv()
    with pytest.raises(
        KernelError, match=r"CUDA error: invalid configuration argument \(cudaErrorInvalidConfiguration\)"
    ):
        kernel(q[:, :, :1], k, v)
    assert kernel(q, k, v)[0].isfinite().all()


def test_a_gpu_of_another_kind_is_refused_by_name(fa1, monkeypatch):
    """A kernel has machine code for the GPU it was loaded for; CUDA would say that there is no image for the other."""
    kernel = Kernel.__new__(Kernel)
    kernel.rung, kernel.device, kernel.capability = fa1.rung, "cuda", (9, 0)
    call = SimpleNamespace(inputs={"Q": SimpleNamespace(device=torch.device("cuda:1"))})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    words = r"cuda:1 has compute capability 8.0, 03_fa1_fp32 was compiled for 9.0: load it under `with torch.cuda.device\(1\)"
    with pytest.raises(CallError, match=words):
        kernel._run(call)


@pytest.mark.parametrize(("said", "words"), [("two", "'two'"), ("-1", "'-1'"), ("1.5", "'1.5'")])
def test_a_number_of_threads_that_is_none_is_refused_by_name(monkeypatch, said, words):
    monkeypatch.setenv("FA_EMULATOR_THREADS", said)
    with pytest.raises(ValueError, match=f"FA_EMULATOR_THREADS is {words}: it has to be a number of threads"):
        load("01", device="cpu", quiet=True)


def test_no_number_of_threads_means_as_many_as_there_are_cores(monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_THREADS", " ")
    assert load("01", device="cpu", quiet=True).launcher.threads >= 1
    monkeypatch.setenv("FA_EMULATOR_THREADS", "3")
    assert load("01", device="cpu", quiet=True).launcher.threads == 3

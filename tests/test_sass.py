"""Registers, spills and opcodes of real cubins, and of ptxas's and cuobjdump's own words."""

import dataclasses
import textwrap

import pytest

from helpers import sass
from helpers.errors import CompileError
from helpers.ladder import rung, rungs

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z8fa2_fp32ILi64EEv7fa_args' for 'sm_90a'
ptxas info    : Function properties for _Z8fa2_fp32ILi64EEv7fa_args
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 4096 bytes smem
ptxas info    : Compiling entry function '_Z7softmaxPKfPf' for 'sm_90a'
ptxas info    : Function properties for _Z7softmaxPKfPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
"""
LISTING = """\
\t\tFunction : _Z7softmaxPKfPf
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDS.128 R4, [R2] ;                  /* 0x0000000002047984 */
        /*0020*/             @UP1  UMOV UR4, 0x1 ;                     /* 0x0000000100047882 */
        /*0030*/                   LDS R8, [R2+0x10] ;                 /* 0x0000100002087984 */
        /*0040*/                   FFMA.FTZ R0, R4, R5, R0 ;           /* 0x0000000504007223 */
        /*0050*/                   EXIT ;                              /* 0x000000000000794d */
        /*0060*/                   NOP ;                               /* 0x0000000000007918 */
"""


def test_ptxas_is_read_kernel_by_kernel():
    frame = sass.parse_ptxas(LOG)
    assert frame.loc["fa2_fp32<64>"].to_dict() == {
        "registers": 168,
        "stack_bytes": 8,
        "spill_store_bytes": 12,
        "spill_load_bytes": 16,
        "smem_bytes": 4096,
        "barriers": 1,
    }
    assert frame.loc["softmax"].to_dict() == dict.fromkeys(sass.COLUMNS, 0) | {"registers": 32}
    with pytest.raises(ValueError, match="no kernel"):
        sass.parse_ptxas("ptxas info    : 0 bytes gmem\n")


def test_opcodes_are_counted_with_predicates_and_without_padding():
    counted = sass.count_opcodes(LISTING)["softmax"]
    assert counted.to_dict() == {"LDS": 2, "LDC": 1, "UMOV": 1, "FFMA": 1, "EXIT": 1}
    assert counted.index[0] == "LDS"  # the most frequent first
    full = sass.count_opcodes(LISTING, modifiers=True)["softmax"]
    assert full["LDS.128"] == full["LDS"] == full["FFMA.FTZ"] == 1


def test_names_are_as_in_the_source():
    assert sass.demangle("_Z8fa2_fp32ILi64EEv7fa_args") == "fa2_fp32<64>"
    assert sass.demangle("_Z7softmaxPKfPf") == "softmax"
    assert sass.demangle("_ZN12_GLOBAL__N_17softmaxEPKf") == "softmax"
    assert sass.demangle("_Z1fILb1ELi32EEvPfPFviE") == "f<true, 32>"
    assert sass.demangle("plain_c") == "plain_c"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("stem", [r.stem for r in rungs()])
def test_every_rung_compiles_without_a_gpu(stem, arch):
    frame = sass.resources(stem, arch)
    assert len(frame) >= 1
    assert frame["registers"].between(8, 255).all()
    opcodes = sass.histogram(stem, arch)
    assert set(opcodes.columns) == set(frame.index)
    assert (opcodes.loc["EXIT"] >= 1).all()
    assert any(name.startswith(("FFMA", "FADD", "FMUL")) for name in opcodes.index)


def made(body, stem="made"):
    return dataclasses.replace(rung("01_naive"), stem=stem, source=textwrap.dedent(body))


def test_shared_memory_and_spills_are_those_of_the_source():
    kernel = made(
        """
        __global__ void shares(float *x) {
          __shared__ float X_smem[256];
          X_smem[threadIdx.x] = x[threadIdx.x];
          __syncthreads();
          x[threadIdx.x] = X_smem[255 - threadIdx.x];
        }
        __global__ __launch_bounds__(1024, 2) void spills(float *x) {  // 32 registers at most
          float r[64];
        #pragma unroll
          for (int i = 0; i < 64; ++i) r[i] = x[i * blockDim.x + threadIdx.x];
          __syncthreads();
        #pragma unroll
          for (int i = 0; i < 64; ++i) x[(i + 1) * blockDim.x + threadIdx.x] = r[63 - i] * r[i];
        }
        """
    )
    frame = sass.resources(kernel, "sm_80")
    assert frame.loc["shares", "smem_bytes"] == 1024
    assert frame.loc["shares", "barriers"] == 1
    assert frame.loc["spills", "registers"] == 32
    assert frame.loc["spills", "spill_store_bytes"] > 0
    opcodes = sass.histogram(kernel, "sm_80")
    assert opcodes.loc["BAR", "shares"] == 1
    assert opcodes.loc["STL", "spills"] > 0
    assert opcodes.loc["STL", "shares"] == 0


def test_an_unchanged_source_is_not_compiled_again(monkeypatch):
    sass.histogram("01_naive", "sm_80")

    def refuse(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(sass.subprocess, "run", refuse)
    sass.histogram("01_naive", "sm_80")
    with pytest.raises(AssertionError, match="compiled again"):
        sass.resources(made("__global__ void other() {}"), "sm_80")


def test_an_error_is_the_compiler_s_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_CACHE", str(tmp_path))
    with pytest.raises(CompileError, match=r'01_naive.cu\(2\): error: identifier "Q_smem" is undefined'):
        sass.resources(made("__global__ void k() {\n  Q_smem[0] = 1;\n}"), "sm_80")
    assert not list(tmp_path.iterdir())

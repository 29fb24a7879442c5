"""Registers, spills and opcodes of real cubins, and of ptxas's and cuobjdump's own words."""

import dataclasses
import textwrap
from types import SimpleNamespace

import pandas as pd
import pytest

from helpers import sass, single
from helpers.ladder.errors import CompileError, ToolkitError
from helpers.ladder.rung import rung
from helpers.toolchain import loops

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


def test_waits_of_a_real_kernel():
    frame = sass.between_waits("31_warp_specialized", D=64)
    assert frame.index[0] == "the loop begins" and len(frame) > 2
    assert frame["HGMMA"].sum() == 64 // 16 + 128 // 16 and frame["MUFU.EX2"].sum() >= 64
    one = single("31_warp_specialized", 64, "bf16")
    edited = one.replace("fa::ex2_approx_ftz(__fmaf_rn(S_reg", "fabsf(__fmaf_rn(S_reg")
    less = sass.between_waits(dataclasses.replace(one, source=edited), D=64)
    assert less["MUFU.EX2"].sum() == frame["MUFU.EX2"].sum() - 64
    with pytest.raises(ValueError, match="no kernel for D = 96"):
        sass.between_waits("31_warp_specialized", D=96)


@pytest.mark.parametrize(("stem", "kernel"), [("32_ping_pong", "ping_pong"), ("51_one_sided", "one_sided")])
@pytest.mark.parametrize("D", [64, 128])
def test_exponentials_of_32_and_51_read_registers_of_two_banks(stem, kernel, D):
    """The FFMA before an exponential reads S and m. Where ptxas puts the m of both rows into one bank, half of them read it twice. Here
    it doesn't, in the loop that votes and in the one that tracks."""
    votes, tracks = loops_of_tiles(single(stem, D, "bf16"), D, kernel)
    assert loops.from_one_bank(votes) <= 8 and loops.from_one_bank(tracks) <= 8


def test_but_for_the_pair_of_registers_ptxas_puts_both_rows_maxima_into_one_bank():
    one = single("51_one_sided", 128, "bf16")
    pair = "m_reg[0] = __int_as_float(__double2loint(pair)), m_reg[1] = __int_as_float(__double2hiint(pair));"
    votes, _ = loops_of_tiles(dataclasses.replace(one, source=one.replace(pair, ";")), 128, "one_sided")
    assert loops.from_one_bank(votes) == 32


def loops_of_tiles(rung, D, kernel):
    """The two loops over tiles of 32 and of 51: that which votes, and that which tracks the maximum."""
    code = sass._code(sass.disassembly(rung))
    found = loops.loops(code[sass.instance(code, D, "bf16", kernel)])
    both = sorted(
        (one for one in found if sum(sass.is_named(name, "HGMMA") for _, name, _ in one) == (12 if D == 64 else 16)),
        key=len,
    )
    votes = both[0]
    tracks = next(one for one in both if votes[0] not in one)
    for loop in (votes, tracks):
        assert sum(sass.is_named(name, "FFMA") for _, name, _ in loop) == 64
    return votes, tracks


@pytest.mark.parametrize(
    ("opcode", "name"),
    [
        ("HMMA.16816.F32.BF16", "HMMA"),
        ("LDSM.16.MT88.4", "LDSM"),
        ("LDS.128", "LDS"),
        ("LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS"),
        ("IMAD.MOV.U32", "MOV"),
        ("UMOV", "MOV"),
        ("IMAD.IADD", "IADD3"),
        ("VIADD", "IADD3"),
        ("IMAD.WIDE.U32", "IMAD"),
        ("MUFU.EX2", "MUFU"),
        ("BAR.SYNC.DEFER_BLOCKING", "BAR"),
        ("FSETP.GEU.AND", "SEL, SETP"),
        ("LDGDEPBAR", "other"),
        ("FMNMX3", "other"),
    ],
)
def test_each_opcode_has_its_class(opcode, name):
    assert sass._class(opcode) == name


def test_a_kernel_is_found_by_head_dimension_and_dtype():
    names = [f"fa2<{d}, {t}>" for d in (64, 128) for t in ("fa::fp16", "fa::bf16")]
    assert sass.instance(names, 128, "bf16") == "fa2<128, fa::bf16>"
    assert sass.instance(["scores", "softmax"], 64, "fp32", "soft") == "softmax"
    assert sass.instance(["k<fa::fp16, 64, 128>", "k<fa::fp16, 128, 64>"], 128, "fp16") == "k<fa::fp16, 128, 64>"
    assert sass.instance(["fa2<Tile<64, 128>, fa::fp16>", "fa2<Tile<128, 64>, fa::fp16>"], 64, "fp16").startswith(
        "fa2<Tile<64"
    )
    with pytest.raises(ValueError, match="no kernel for D = 32, fp16; there are fa2<64, fa::fp16>"):
        sass.instance(names, 32, "fp16")
    with pytest.raises(ValueError, match="2 kernels for D = 64, fp32; there are scores, softmax"):
        sass.instance(["scores", "softmax"], 64, "fp32")


def test_opcodes_of_an_edited_kernel_beside_the_kernel_s_own():
    original = rung("04_fa2_fp32")
    edited = dataclasses.replace(original, source=original.replace("#pragma unroll 16 ", "#pragma unroll 1 "))
    frame = sass.compare(original, edited, dtype="fp32")
    assert frame.columns.tolist() == ["04_fa2_fp32", "04_fa2_fp32 (2)", "change"]
    assert (frame["change"] == frame.iloc[:, 1] - frame.iloc[:, 0]).all()
    assert frame.loc["FFMA", "change"] < -500
    whole = sass.histogram("04_fa2_fp32")["fa2_fp32<64>"]
    assert frame.loc["FFMA", "04_fa2_fp32"] == whole["FFMA"]
    assert frame.loc["all", "04_fa2_fp32"] == whole.sum()
    inside = sass.compare("04_fa2_fp32", dtype="fp32", loop=True)
    assert 0.9 * whole["FFMA"] < inside.loc["FFMA", "04_fa2_fp32"] <= whole["FFMA"]
    assert inside.loc["all", "04_fa2_fp32"] < frame.loc["all", "04_fa2_fp32"]
    assert "BAR" in inside.index and "STG" not in inside.index  # the output is written behind the loop


def test_the_table_goes_by_head_dimension_and_then_by_dtype(monkeypatch):
    names = [f"fa2<fa::{t}, {d}>" for d in (128, 64) for t in ("bf16", "fp16")]
    columns = ["registers", "spill_store_bytes", "spill_load_bytes"]
    monkeypatch.setattr(sass, "resources", lambda *_: pd.DataFrame(0, index=names, columns=columns))
    assert list(sass.table("13")["kernel"]) == names[::-1]


def test_spilled_bytes_are_those_stored_and_those_loaded(monkeypatch):
    monkeypatch.setattr(sass, "resources", lambda *_: sass.parse_ptxas(LOG))
    frame = sass.table("04").set_index("kernel")
    assert frame["spilled_bytes"].to_dict() == {"softmax": 0, "fa2_fp32<64>": 12 + 16}


def test_opcodes_and_the_table_are_of_the_architecture_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(sass, "disassembly", lambda _, arch="sm_90a": asked.append(arch) or LISTING)
    monkeypatch.setattr(sass, "resources", lambda _, arch="sm_90a": asked.append(arch) or sass.parse_ptxas(LOG))
    sass.opcodes("02", arch="sm_80")
    sass.table("02", arch="sm_80")
    assert asked == ["sm_80", "sm_80"]


def test_the_table_joins_the_cubin_and_the_header_block():
    frame = sass.table("03_fa1_fp32", "04_fa2_fp32").set_index("kernel")
    row = frame.loc["fa2_fp32<128>"]
    assert row["rung"] == "04_fa2_fp32" and row["spilled_bytes"] == 0
    assert row[["Br", "Bc", "threads", "smem_kb", "ctas"]].tolist() == [64, 128, 128, 84, 2]
    assert row["registers"] == sass.resources("04_fa2_fp32").loc["fa2_fp32<128>", "registers"]
    assert sass.tile(rung("04_fa2_fp32"), 48) == {}
    assert list(frame.index[-3:]) == ["fa2_fp32<32>", "fa2_fp32<64>", "fa2_fp32<128>"]


def test_names_are_as_in_the_source():
    assert sass.demangle("_Z8fa2_fp32ILi64EEv7fa_args") == "fa2_fp32<64>"
    assert sass.demangle("_Z7softmaxPKfPf") == "softmax"
    assert sass.demangle("_ZN12_GLOBAL__N_17softmaxEPKf") == "softmax"
    assert sass.demangle("_Z1fILb1ELi32EEvPfPFviE") == "f<true, 32>"
    assert sass.demangle("plain_c") == "plain_c"


@pytest.mark.parametrize(
    ("stem", "arch"),
    [("02_online_softmax", "sm_80"), ("23_backward_mma", "sm_90a"), ("32_ping_pong", "sm_90a")],
)
def test_the_listing_has_the_kernels_that_ptxas_names(stem, arch):
    opcodes = sass.histogram(stem, arch)
    assert set(opcodes.columns) == set(sass.resources(stem, arch).index)
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


def test_flags_and_nvccs_version_are_part_of_a_cubins_name(cache, monkeypatch):
    def compiled(rung, nvcc, flags, folder):
        folder.mkdir(parents=True)
        (folder / "kernel.cubin").touch()
        (folder / "ptxas.log").touch()

    monkeypatch.setattr(sass, "_compile", compiled)
    paths, toolkit = {sass.cubin("01", "sm_80")}, sass.find_toolkit()
    monkeypatch.setattr(sass, "NVCC_FLAGS", [*sass.NVCC_FLAGS, "-g"])
    paths.add(sass.cubin("01", "sm_80"))
    monkeypatch.setattr(sass, "find_toolkit", lambda: dataclasses.replace(toolkit, version="another"))
    assert len(paths | {sass.cubin("01", "sm_80")}) == 3


@pytest.mark.parametrize("lost", ["kernel.cubin", "ptxas.log"])
def test_a_cubin_that_has_lost_a_file_is_made_again(cache, lost):
    kernel = made("__global__ void k() {}")
    (sass.cubin(kernel, "sm_80").parent / lost).unlink()
    assert sass.histogram(kernel, "sm_80").loc["EXIT", "k"] == 1
    assert len(sass.resources(kernel, "sm_80")) == 1


def test_a_build_that_was_killed_is_swept_up_by_later_ones(cache, monkeypatch):
    def killed(*_, **__):
        left = [path.name for path in cache.iterdir() if path.is_dir()]
        raise AssertionError(left)

    monkeypatch.setattr(sass.subprocess, "run", killed)
    with pytest.raises(AssertionError, match=r"\['\.building-[^,]*\]"):  # the name that compile.py looks for
        sass.cubin(made("__global__ void k() {}"), "sm_80")


def test_an_error_is_the_compiler_s_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_CACHE", str(tmp_path))
    with pytest.raises(CompileError, match=r'01_naive.cu\(2\): error: identifier "Q_smem" is undefined'):
        sass.resources(made("__global__ void k() {\n  Q_smem[0] = 1;\n}"), "sm_80")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("done", [{"returncode": 1, "stdout": "Function : k"}, {"returncode": 0, "stdout": ""}])
def test_a_listing_that_can_not_be_made_is_an_error(monkeypatch, done):
    monkeypatch.setattr(sass.subprocess, "run", lambda *_, **__: SimpleNamespace(**done, stderr="no cubin"))
    with pytest.raises(ToolkitError, match="could not read the cubin: no cubin"):
        sass.cuobjdump("x.cubin", "-sass")

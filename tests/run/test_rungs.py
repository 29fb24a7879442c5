"""Every rung against every case, on the emulator and on a GPU; what nvcc makes of it; and the rules of the ladder."""

from __future__ import annotations

import difflib
import inspect
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import unchanged
from executed import drawn

from helpers import CompileError, KernelError, check, load, reference, rung, rungs, sass
from helpers.emulator.launcher import INCLUDE as EMULATOR
from helpers.emulator.launcher import pretending
from helpers.emulator.translate import unit
from helpers.ladder import cards
from helpers.ladder.cards import capability
from helpers.ladder.contract import TORCH_NAMES, Call, FaBackwardArgs
from helpers.ladder.paths import STAGES
from helpers.ladder.rung import INCLUDE, KERNELS, Rung
from helpers.ladder.rung import code as bare
from helpers.run.reference import Case
from helpers.toolchain.compile import digest, making
from helpers.toolchain.compiler import find_compiler
from helpers.toolchain.toolkit import NVCC_FLAGS, find_toolkit

STEMS = [r.stem for r in rungs()]
EMULATOR_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# KB of shared memory that a block may have, by architecture (CUDA C++ Programming Guide, "Compute Capabilities")
SMEM = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99}
# Compiled for these when a rung has changed; for the others, 70 builds after a change of a header, with --all or --record
ALWAYS = ("sm_80", "sm_90a")
BUILDS = [(r.stem, arch) for r in rungs() for arch in SMEM if not cards.refusal(r, capability(arch))]
TABLE = re.compile(r"D=(?P<D>\d+)(, +(?P<kb>\d+) KB per block[^:]*)?:(?P<row>.*)")
# Bytes. Of 13 and 20 those of D = 128, which fills the registers: `take_to` and `largest_sum` take two more. What is spilled waits
# from one phase of a tile to the next, is stored and loaded once in a tile of 256 mma.sync. Measured on sm_90a: variants of 13 without
# any are slower, and those of 20 with fewer on sm_120 (none) and sm_100 are 2 to 5 % slower at D = 128.
# From sm_100 on two runs of nvcc differ, as it splits its work among threads: here stands the most that any run has spilled.
SPILLS = {
    ("02_online_softmax", "sm_86"): 4,
    ("02_online_softmax", "sm_89"): 4,
    ("10_fa2_mma_fp16", "sm_120"): 36,
    ("11_swizzled", "sm_100"): 28,
    ("11_swizzled", "sm_103"): 28,
    ("11_swizzled", "sm_120"): 44,
    ("13_tuned", "sm_90a"): 16,
    ("13_tuned", "sm_100"): 48,
    ("13_tuned", "sm_103"): 64,
    **{("20_causal_gqa", arch): 12 for arch in ("sm_80", "sm_86", "sm_89", "sm_90a")},
    ("20_causal_gqa", "sm_100"): 120,
    ("20_causal_gqa", "sm_103"): 64,
    ("20_causal_gqa", "sm_120"): 176,
    ("23_backward_mma", "sm_100"): 52,
    ("23_backward_mma", "sm_103"): 52,
    ("23_backward_mma", "sm_120"): 16,
}


def tile_table(rung: Rung, kb: int = 227) -> dict[int, dict[str, int]]:
    """The header block's tile table where a block has this many KB of shared memory:
    {64: {"Br": 128, "Bc": 64, "threads": 128, "smem": 84, "CTAs/SM": 2}, ...}. A row for so many KB or less has what differs."""
    rows: dict[int, dict[str, int]] = {}
    for m in TABLE.finditer(rung.tiles):
        if not m["kb"] or kb <= int(m["kb"]):
            rows.setdefault(int(m["D"]), {}).update({k: int(n) for k, n in re.findall(r"([\w/]+)=(\d+)", m["row"])})
    return rows


# --- right


@pytest.mark.parametrize(
    ("device", "size"),  # the full cases would take the emulator hours
    [("cpu", "small"), *(pytest.param("cuda", size, marks=pytest.mark.gpu) for size in ("small", "full"))],
)
@pytest.mark.parametrize("stem", STEMS)
def test_every_case_is_within_the_error_budget(stem, device, size, pytestconfig):
    """On the emulator all of the first dtype; of the second, which goes through the same template, a share unless --all."""
    kernel = load(stem, device=device, quiet=True)
    cases = reference.cases(kernel.rung, device, size)
    few = kernel.rung.dtypes[1:] if device == "cpu" else ()
    check(kernel, unchanged.share(cases, stem, pytestconfig, few)).require()


def tiled() -> list[tuple[str, int, int, int]]:
    """(stem, D, Br, Bc) for every row of a tile table."""
    return [(r.stem, D, row["Br"], row["Bc"]) for r in rungs() for D, row in tile_table(r).items() if "Br" in row]


@EMULATOR_AND_GPU
@pytest.mark.parametrize(("stem", "D", "Br", "Bc"), tiled())
def test_the_edges_of_its_own_tiles(stem, D, Br, Bc, device):
    """One row and one key short of a tile, a whole one, one more: every branch of the tail."""
    torch.manual_seed(D)
    kernel = load(stem, device=device, quiet=True)

    def case(Nq: int, Nk: int, dtype: str) -> Case:
        q, k, v, do = (torch.randn(1, 2, n, D, device=device).to(reference.DTYPES[dtype]) for n in (Nq, Nk, Nk, Nq))
        back = {"do": do} if kernel.rung.op == "attention_backward" else {}
        return Case(f"Nq={Nq}, Nk={Nk}, {dtype}", q, k, v, **back)

    steps = [(-1, 1), (0, 0), (1, -1)]
    check(kernel, [case(Br + i, 2 * Bc + j, dtype) for i, j in steps for dtype in kernel.rung.dtypes]).require()


# What readers are invited to play with.
EDITS = {
    "10_fa2_mma_fp16": ["warps = 2", "warps = 8", "Bc = 32", "Bc = 128"],
    "11_swizzled": ["warps = 2", "warps = 8", "Bc = 32", "Bc = 128", "warps = 8; Bc = 32"],
    "12_double_buffered": ["warps = 2", "warps = 8", "Bc = 32", "Bc = 128", "stages = 3", "stages = 4"],
}


@pytest.mark.sampled
@EMULATOR_AND_GPU
@pytest.mark.parametrize(("stem", "edit"), [(stem, edit) for stem, edits in EDITS.items() for edit in edits])
def test_another_tile_is_right_or_refused(stem, edit, device):
    """A constant of the first rungs on tensor cores changed: right for every D, or an assertion says why it can't be. (The
    tiles are the same for both types.)"""
    rung = next(r for r in rungs() if r.stem == stem)
    source = rung.source
    for one in edit.split("; "):
        source, edits = re.subn(rf"(\bstatic constexpr int ){one.split()[0]} = \d+", rf"\g<1>{one}", source)
        assert edits == 1
    source, edits = re.subn(r"a\.dtype == FA_FP16 \? (launch<d, fa::fp16>.*?): launch<d, fa::bf16>.*;", r"\1;", source)
    assert edits == 1
    if ";" in edit:  # at D = 32 all threads together copy more rows than the tile has
        with pytest.raises(CompileError, match="a tile is a whole number of passes"):
            load(source=source, device=device, quiet=True)
        return
    kernel = load(source=source, device=device, quiet=True)

    def case(D: int, dtype: str) -> Case:
        q, k, v = (torch.randn(1, 2, n, D, device=device).to(reference.DTYPES[dtype]) for n in (130, 300, 300))
        return Case(f"D={D}, {dtype}", q, k, v)

    torch.manual_seed(0)
    check(kernel, [case(D, "fp16") for D in rung.D]).require()


@EMULATOR_AND_GPU
@pytest.mark.parametrize("N", [16384, 32767, 32768, 32769, 49152, 65539])
def test_softmax_of_rows_too_long_for_one_block(N, device):
    torch.manual_seed(N)
    s = torch.randn(2, N, device=device) + torch.linspace(0, 40, N, device=device)
    s[1, N // 3 :] = -torch.inf  # whole slices without a finite score
    check(load("02_online_softmax", device=device, quiet=True), [Case(f"N={N}", s=s)]).require()


@EMULATOR_AND_GPU
@pytest.mark.parametrize("skip", [1, 2, 3])
def test_softmax_of_rows_that_start_anywhere(skip, device):
    """A view whose first element is at no multiple of 16 bytes, read and written."""
    torch.manual_seed(skip)
    s = torch.randn(3 * 131 + skip, device=device)[skip:].view(3, 131)
    p = torch.full((3 * 131 + 2,), torch.nan, device=device)[2:].view(3, 131)
    lse = torch.empty(3, device=device)
    kernel = load("02_online_softmax", device=device, quiet=True)
    kernel(s, out=(p, lse))
    check(lambda s: (p, lse), [Case("anywhere", s=s)]).require()


@EMULATOR_AND_GPU
@pytest.mark.parametrize("stem", STEMS)
def test_what_a_launcher_can_not_do_it_refuses(stem, device):
    """The last line of defence, below the shape contract of helpers.kernel: an error, never a wrong answer."""
    kernel = load(stem, device=device, quiet=True)
    codes = {name: code for code, name in enumerate(TORCH_NAMES)}  # fa_dtype
    own = kernel.rung.dtypes[0]

    def launch(shift: int = 0, row: int = 64, **wrong: int) -> None:
        names = [*"QKVO", *(("dO", "dQ", "dK", "dV") if kernel.rung.op == "attention_backward" else ())]
        sizes = dict.fromkeys(names, 4 * 68) | {"LSE": 4} | {name: 128 * 64 for name, _ in kernel.rung.workspace}
        dtypes = dict.fromkeys(names, reference.DTYPES[own])
        memory = {x: torch.zeros(n + shift, dtype=dtypes.get(x), device=device)[shift:] for x, n in sizes.items()}
        right = {"B": 1, "H": 1, "Nq": 4, "Nk": 4, "D": 64, "scale": 1.0, "dtype": codes[own]}
        right |= {"Hkv": 1, "sequences": 1, "splits": 1}
        args = FaBackwardArgs(LSE=memory["LSE"].data_ptr(), **right | wrong)
        for name in names:
            setattr(args, name, memory[name].data_ptr())
            getattr(args, f"{name}_stride")[:] = [4 * row, 4 * row, row]
        args.workspace[: len(memory) - len(names) - 1] = [memory[name].data_ptr() for name, _ in kernel.rung.workspace]
        workspace = {name: memory.pop(name) for name, _ in kernel.rung.workspace}
        call = Call(args, {}, memory, workspace)
        kernel.launcher.launch(call, torch.cuda.current_stream().cuda_stream if device == "cuda" else 0)

    launch()
    wrong = [{"dtype": code} for name, code in codes.items() if name not in kernel.rung.dtypes]
    wrong += [{"B": 0}, {"H": 0}, {"Nq": 0}, {"Nk": 0}, {"D": 0}]
    if kernel.rung.D:  # a fixed list of D goes with 16-byte accesses
        wrong += [{"D": 48}, {"D": 256}, {"shift": 1}, {"row": 65}]
    if kernel.rung.features:  # its launcher reads fa_model_args
        numbers = torch.tensor([0, 4], dtype=torch.int32, device=device)
        at = {name: numbers.data_ptr() for name in ("q_starts", "k_starts", "lengths", "pages")}
        asked = {
            "window": {"causal": 1, "window": 2},
            "varlen": {"q_starts": at["q_starts"], "k_starts": at["k_starts"]},
            "lengths": {"lengths": at["lengths"]},
            "pages": {"pages": at["pages"], "max_pages": 1, "page": 4},
        }
        if kernel.rung.op == "attention_backward":
            asked["deterministic"] = {"deterministic": 1}
        wrong += [fields for feature, fields in asked.items() if feature not in kernel.rung.features]
        wrong += [{"window": 2}, {"causal": 1, "window": -1}, {"Hkv": 0}, {"H": 3, "Hkv": 2}]
    for case in wrong:
        with pytest.raises(KernelError, match="invalid argument"):
            launch(**case)
    launch()  # a refusal leaves nothing behind


@EMULATOR_AND_GPU
@pytest.mark.parametrize("N", [100, 1500, 40000])
def test_a_nan_makes_its_row_nan_and_no_other(N, device):
    """A row of one warp, of several, of several blocks. As torch.softmax; elsewhere -inf is a score like any other."""
    torch.manual_seed(N)
    s = torch.randn(5, N, device=device)
    s[1, N // 3], s[2, N // 2 :], s[3] = torch.nan, -torch.inf, -torch.inf
    s[4, : N // 2], s[4, -1] = -torch.inf, torch.nan
    p, lse = load("02_online_softmax", device=device, quiet=True)(s)
    assert p[[1, 4]].isnan().all() and lse[[1, 4]].isnan().all()
    assert torch.equal(p[3], torch.zeros_like(p[3])) and lse[3] == -torch.inf
    torch.testing.assert_close(p[[0, 2]], s[[0, 2]].softmax(-1))


# --- what nvcc makes of it


def compile_time_errors(rung: Rung, more: list[str], arch: str = "sm_90a") -> str:
    """What a compiler that only checks says of the rung with `more` lines at its end."""
    source = unit("\n".join([rung.source, *more, ""]), str(rung.path), INCLUDE)
    command = [find_compiler(), "-std=c++17", "-fsyntax-only", f"-I{EMULATOR}", *pretending(arch), "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    ("stem", "arch"),
    [
        (r.stem, arch)
        for r in rungs()
        for arch in ("sm_75", "sm_80", "sm_86", "sm_90a")
        if tile_table(r) and (r.stem, arch) in BUILDS
    ],
)
def test_its_tile_table_is_what_the_code_says(stem, arch):
    """A static_assert for every number in the header block's table; and its shared memory is there."""
    its = rung(stem)
    table = tile_table(its, SMEM[arch])
    asserts = [f"static_assert(Tile<{D}>::smem_bytes <= {SMEM[arch]} * 1024);" for D in table]
    asserts += [
        f"static_assert(Tile<{D}>::{name} == {value});"
        if name != "smem"
        else f"static_assert((Tile<{D}>::smem_bytes + 1023) / 1024 == {value});"
        for D, row in table.items()
        for name, value in row.items()
        if name in ("Br", "Bc", "threads", "smem")
    ]
    assert asserts and not (said := compile_time_errors(its, asserts, arch)), said


def test_a_wrong_number_in_a_tile_table_is_seen():
    wrong = "static_assert(Tile<64>::threads == 7);"
    assert "static assertion failed" in compile_time_errors(rung("12_double_buffered"), [wrong])


COMPILED = Path(__file__).with_name("compiled.txt")  # what was within its budget: stem, arch, digest


def budget_of(rung: Rung, arch: str) -> str:
    """A line of COMPILED: with the digest of the code, of what the header block promises, of nvcc and of the test."""
    promised = rung.digest, rung.tiles, rung.arch, SPILLS.get((rung.stem, arch)), SMEM[arch]
    tested = inspect.getsource(test_nvcc_compiles_it_within_its_budget)
    its = digest(promised, arch, NVCC_FLAGS, find_toolkit().version, tested)
    return f"{rung.stem} {arch} {its}"


@cache
def within_budget() -> list[str]:
    """The recorded lines, of which any number may be of what there is no longer."""
    return COMPILED.read_text().splitlines() if COMPILED.exists() else []


def test_a_rung_whose_code_or_table_has_changed_is_compiled_again():
    one = rung("12_double_buffered")
    other = [replace(one, source=one.replace("warps = 4", "warps = 8")), replace(one, tiles=one.tiles + " CTAs/SM=9")]
    assert len({budget_of(one, "sm_80"), budget_of(one, "sm_90a"), *(budget_of(r, "sm_80") for r in other)}) == 4


@pytest.mark.parametrize(("stem", "arch"), BUILDS)
def test_nvcc_compiles_it_within_its_budget(stem, arch, request):
    """No spills; registers and shared memory leave room for the blocks per SM that the header block promises."""
    rung, asked = next(r for r in rungs() if r.stem == stem), request.config.option
    line = budget_of(rung, arch)
    again = [] if asked.record else drawn(within_budget(), asked.seed)
    if line in within_budget() and line not in again and not asked.all:
        pytest.skip("it was within its budget, and neither it nor nvcc has changed since")
    if arch not in ALWAYS and line not in again and not (asked.all or asked.record):
        pytest.skip("compiled for this architecture with --all or --record")
    used = sass.resources(rung, arch)
    assert used["registers"].between(8, 255).all()
    spills, most = used[["spill_store_bytes", "spill_load_bytes"]], SPILLS.get((stem, arch), 0)
    assert (spills <= most).all(axis=None) and (used["stack_bytes"] <= -(-most // 8) * 8).all(), used.to_string()

    table = tile_table(rung, SMEM[arch])
    threads = max(map(int, re.findall(r"threads=(\d+)", rung.tiles)))
    for kernel, row in used.iterrows():
        tile = next((t for D, t in table.items() if re.search(rf"<{D}[,>]", kernel)), {})
        assert tile or not table, f"{kernel} has no row in the tile table"
        ctas = tile.get("CTAs/SM", 1)
        registers = -(-row.registers // 8) * 8  # allocated by eights
        named = re.search(r"<(\d+)", kernel) if not table else None  # softmax<256, 8> has 256 threads
        its_threads = int(named[1]) if named else tile.get("threads", threads)
        assert registers * its_threads * ctas <= 65536, f"{kernel}: {row.registers} registers"
    for D, tile in table.items():
        assert tile["smem"] <= SMEM[arch], f"D={D}: more shared memory than {arch} has"
        assert arch != "sm_90a" or (tile["smem"] + 1) * tile.get("CTAs/SM", 1) <= 228
    if asked.record:
        with making(COMPILED):  # one worker at a time
            others = COMPILED.read_text().splitlines() if COMPILED.exists() else []
            others = [known for known in others if not known.startswith(f"{stem} {arch} ")]
            COMPILED.write_text("\n".join([*sorted([*others, line]), ""]))


# --- the rules of the ladder

SOURCES = [*sorted(KERNELS.glob("*.cu")), *sorted(STAGES.glob("*.cu")), *sorted(INCLUDE.rglob("*.cuh"))]


def code(path: Path) -> str:
    """The text without comments."""
    return re.sub(r"//.*|/\*[\s\S]*?\*/", "", path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_clang_format_has_nothing_to_say(path):
    formatter = Path(sys.executable).with_name("clang-format")
    done = subprocess.run([formatter, "--dry-run", "-Werror", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# How many statements of inline PTX a rung has outside fa/. Notebook 33 explains this one: by it P keeps its registers.
OWN_PTX = {"33_backward_wgmma": 1}


@pytest.mark.parametrize("stem", STEMS)
def test_a_rung_reads_alone(stem):
    """It includes fa/ and CUDA headers only, leaves inline PTX to fa/ but for OWN_PTX, and names what it changed and where it is
    from."""
    rung = next(r for r in rungs() if r.stem == stem)
    text = code(rung.path)
    for header in re.findall(r"^\s*#\s*include\s*(\S+)", text, re.MULTILINE):
        assert re.fullmatch(r"<fa/\w+\.cuh>|<cuda\w*\.h>", header), f"{stem} includes {header}"
    assert len(re.findall(r"\basm\b", text)) == OWN_PTX.get(stem, 0), f"{stem} has inline PTX outside fa/"
    assert rung.tiles and rung.paper and rung.speed
    assert bool(rung.changed) == (stem != STEMS[0])


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_every_barrier_says_what_it_separates(path):
    """On its line, or in the comment right above it."""
    above = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.search(r"__sync(threads|warp)\(", line.split("//")[0]):
            said = above + line.partition("//")[2]
            assert re.search(r"\b(before|as above)\b", said), f"{path.name}:{number}: {line.strip()}"
        above = above + line if line.lstrip().startswith("//") else ""


def test_a_rung_changes_little_of_the_one_before(record_property):
    """Neighbours of one decade are one idea apart, in lines of code. The first rungs (0x) are algorithms of their own: only reported."""
    for before, after in zip(rungs(), rungs()[1:]):
        lines = [[line for line in bare(r.source).splitlines() if line.strip()] for r in (before, after)]
        changed = sum(line[0] == "+" for line in difflib.ndiff(*lines))
        record_property(f"{before.stem} -> {after.stem}", changed)
        print(f"{before.stem} -> {after.stem}: {changed} of {len(lines[1])} lines are new")
        same_decade = before.number[0] == after.number[0]
        assert changed < len(lines[1]), f"{after.stem} keeps nothing of {before.stem}"
        limit = 190 if after.stem == "13_tuned" else 60  # all that paid, at once: its guide takes the steps one by one
        assert changed <= limit or not same_decade or before.number[0] in "023", f"{after.stem}: {changed} new lines"


# Rungs that aren't built on the one before: what they are built on, and how many lines of code may be new. 22 is an algorithm
# of its own; of 04 it has the register tiles alone.
BUILT_ON = {
    "20_causal_gqa": ("13_tuned", 160),
    "21_split_kv": ("12_double_buffered", 190),
    "23_backward_mma": ("12_double_buffered", 300),
    "31_warp_specialized": ("30_tma_wgmma", 200),
    "32_ping_pong": ("31_warp_specialized", 283),  # five stages lie between (kernels/stages/32_*.cu)
}


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem in BUILT_ON])
def test_a_rung_keeps_code_of_what_it_is_built_on(stem):
    base, most = BUILT_ON[stem]
    lines = [[line.strip() for line in bare(rung(which).source).splitlines()] for which in (base, stem)]
    new = sum(line[0] == "+" for line in difflib.ndiff(*lines))
    assert new <= most, f"{stem}: {new} of {len(lines[1])} lines of code are not in {base}"


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem >= "2"])
def test_every_rung_of_the_twenties_and_thirties_is_built_on_something(stem):
    assert stem in BUILT_ON or rung(stem).op == "attention_backward" or stem.startswith("30"), stem

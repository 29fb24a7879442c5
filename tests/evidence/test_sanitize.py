"""The mutants and the reader of compute-sanitizer's words. Its verdicts against the X-ray's: test_sanitizer_agreement."""

import stat
import subprocess

import pandas as pd
import pytest

from helpers import record, rung, rungs, sanitize, sass
from helpers.evidence import mutants as made
from helpers.evidence import sanitizer_words as words
from helpers.evidence.catalogue import NOT

ALL = made.mutants()

SAID = {
    "clean": """
========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
""",
    "out of bounds: global read of 16 bytes, math.cuh line 14": """
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at fa::load4(float *, const float *)+0x2a0 in math.cuh:14
=========     by thread (96,0,0) in block (1,0,0)
=========     Access at 0x7f2a3c001000 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2a3c000000 of size 4,096 bytes
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaDeviceSynchronize.
=========
cudaErrorLaunchFailure
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
""",
    "race: write, line 50 and read, line 51": """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void softmax<(int)64, (int)8>(fa_args, int)+0x1100 in 02_online_softmax.cu:50
=========     and Read access at void softmax<(int)64, (int)8>(fa_args, int)+0x1150 in 02_online_softmax.cu:51 [16 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
""",
    "race (warning): write, line 7 and write": """
========= Warning: Race reported between Write access at kernel()+0x10 in 04_fa2_fp32.cu:7
=========     and Write access at kernel()+0x50 [4 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
""",
    "uninitialised: global read of 4 bytes, line 52": """
========= Uninitialized __global__ memory read of size 4 bytes
=========     at softmax(fa_args)+0x470 in 01_naive.cu:52
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f0a00000000 on allocation of size 14,800 bytes
========= ERROR SUMMARY: 1 error
""",
    "barrier: divergent thread(s) in block, line 88": """
========= Barrier error detected. Divergent thread(s) in block
=========     at void fa2_mma<(int)64, fa::fp16>(fa_args)+0x90 in 10_fa2_mma_fp16.cu:88
=========     by thread (32,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
""",
    "warpgroup mma sequence: warp executing warpgroup instruction with a partial mask, sm90.cuh line 156": """
========= Warpgroup MMA sequence error detected. Warp executing warpgroup instruction with a partial mask.
=========     at fa::wgmma_fence()+0x2b10 in sm90.cuh:156
=========     by thread (32,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
""",
    "CUDA error: cudaErrorIllegalAddress": """
========= Program hit cudaErrorIllegalAddress (error 700) due to "an illegal memory access was encountered" on CUDA API call to cudaDeviceSynchronize.
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
""",
    "failed: cudaErrorNoKernelImageForDevice": """
========= Program hit cudaErrorNoKernelImageForDevice (error 209) due to "no kernel image is available for execution on the device" on CUDA API call to cudaLaunchKernel.
========= ERROR SUMMARY: 1 error
""",
    "failed: Error: No attachable process found. compute-sanitizer timed-out.": """
========= Error: No attachable process found. compute-sanitizer timed-out.
""",
}


@pytest.mark.parametrize(("short", "said"), SAID.items(), ids=[s.split(",")[0] for s in SAID])
def test_a_tools_words_in_short(short, said):
    assert words.read(said) == short
    assert words.flagged(short) == (short != "clean" and not short.startswith("failed"))


@pytest.mark.parametrize(
    ("said", "flagging"),
    [
        (("clean", "clean", "clean", "clean"), []),
        (("clean", "race: write", "clean", "clean"), ["racecheck"]),
        (("invalid: read; timeout", "timeout", "clean", "failed: no GPU"), ["memcheck"]),
        (("clean", "timeout", "timeout", "clean"), []),  # slow under two tools, but it does end
        (("timeout", "timeout", "timeout", "failed: no GPU"), []),  # there is no telling
        (("timeout", "timeout", "timeout", "timeout"), list(words.TOOLS)),  # it hangs
    ],
)
def test_a_timeout_counts_where_no_tool_sees_the_end(said, flagging):
    assert words.flagging(dict(zip(words.TOOLS, said))) == flagging


def test_what_a_tool_says_of_the_rung_too_says_nothing_of_a_bug():
    clean = dict.fromkeys(words.TOOLS, "clean")
    own = clean | {"initcheck": "uninitialised: global read of 4 bytes, line 465"}
    assert words.flagging(own) == ["initcheck"] and words.flagging(own, own) == []
    assert words.flagging(own | {"initcheck": own["initcheck"] + "; timeout"}, own) == []
    assert words.flagging(own | {"memcheck": "misaligned: global read of 8 bytes, line 9"}, own) == ["memcheck"]
    for other in (own["initcheck"].replace("465", "466"), own["initcheck"].replace("4 bytes", "8 bytes")):
        assert words.flagging(clean | {"initcheck": other}, own) == ["initcheck"]
    assert words.flagging(clean | {"racecheck": own["initcheck"]}, own) == ["racecheck"]
    assert words.flagging(dict.fromkeys(words.TOOLS, "timeout"), own) == list(words.TOOLS)


def test_a_program_built_without_a_gpu_can_be_compiled_for_a_later_one(tmp_path, monkeypatch):
    """It has PTX in it, and one built for a GPU has not."""
    (mutant,) = sanitize.chosen(["10.original"])
    has_ptx = {}
    for arch in ("", "sm_80"):
        monkeypatch.setattr(sanitize, "_arch", lambda arch=arch: arch)
        (tmp_path / arch).mkdir(exist_ok=True)
        has_ptx[arch] = "Fatbin ptx code" in sass.cuobjdump(sanitize.build(mutant, tmp_path / arch), "-sass")
    assert has_ptx == {"": True, "sm_80": False}


def test_a_pattern_that_matches_no_mutant_is_refused():
    assert [m.id for m in sanitize.chosen(["04.orig*", "03.original"])] == ["03.original", "04.original"]
    with pytest.raises(ValueError, match=r"no mutant '04.orig'; ids read like 04.original or 04.\*"):
        sanitize.chosen(["03.original", "04.orig"])


def test_there_are_enough_mutants_and_each_is_one_change_of_a_rung():
    assert len(ALL) >= 100
    for mutant in ALL.values():
        before, after = made.original(mutant.stem).source.splitlines(), mutant.source.splitlines()
        changed = [n for n, (old, new) in enumerate(zip(before, after), 1) if old != new]
        assert changed[0] == mutant.line, mutant.id
    assert len({m.digest for m in ALL.values()}) == len(ALL), "two mutants are the same"


@pytest.mark.parametrize("stem", [r.stem for r in rungs()])
def test_every_barrier_wait_and_bounds_check_has_a_mutant(stem):
    code = made.code(rung(stem).source.split("[region: launcher]")[0])
    ids = [id for id in ALL.keys() | NOT if id.startswith(stem[:2])]
    for rules, what in {
        "barrier-removed": "__syncthreads();",
        "syncwarp-removed": "__syncwarp();",
        "wait-removed": "fa::cp_async_wait<",
        "commit-removed": "fa::cp_async_commit();",
        "mbarrier-wait-removed wait-of-a-loop-removed": "fa::mbarrier_wait(",
        "named-barrier-removed": "fa::bar_sync(",
        "proxy-fence-removed": "fa::fence_proxy_async();",
        "wgmma-wait-removed": "fa::wgmma_wait_group<",
    }.items():
        assert sum(f".{rule}." in id for id in ids for rule in rules.split()) == code.count(what), rules


def test_a_program_gets_the_rungs_sizes():
    numbers = sanitize.calls(ALL["03.barrier-removed.1"])
    assert numbers == [0, 0, 1, 2, 2, 130, 150, 64, 4, 0, 1, 4 * 260, 4 * 260, 0, 0]
    assert sanitize.calls(ALL["02.barrier-removed.1"])[:12] == [1, 0, 1, 1, 1, 6, 101, 1, 4, 0, 1, 0]
    with_workspace = sanitize.calls(ALL["01.before-the-start"])
    assert with_workspace[11:] == [4 * 2 * 37 * 50, 4 * 2 * 37 * 50, 0, 0]
    causal, split, back = (
        sanitize.calls(made.original(s)) for s in ("20_causal_gqa", "21_split_kv", "23_backward_mma")
    )
    assert causal[:11] == [0, 1, 1, 2, 1, 130, 150, 64, 2, 1, 1]
    assert split[3:] == [2, 1, 5, 700, 64, 2, 1, 2, 4 * 2 * 2 * 5 * 64, 4 * 2 * 2 * 5, 0, 0]
    assert back[0] == 2 and back[11:] == [4 * 2 * 256 * 64, 4 * 2 * 2 * 256, 4 * 2 * 150 * 64, 0]


def test_the_xray_gets_what_the_program_gets():
    """A rung that models need: the X-ray takes it, finds nothing, and a barrier less is found."""
    assert sanitize.xrayed(made.original("21_split_kv")) == words.CLEAN
    assert sanitize.xrayed(ALL["21.barrier-removed.2"]).startswith("race")
    q, k, *_ = ALL["23.barrier-removed.1"].inputs()[0]
    assert q.shape == (1, 2, 130, 64) and k.shape == (1, 1, 150, 64)


def test_what_has_been_found_is_kept_when_a_run_is_cut_off(tmp_path, monkeypatch):
    """Three mutants, the third kills the run: two are in the record, and are not run again."""
    ids = ["04.original", "03.original", "02.original"]
    known = {"device": "NVIDIA H200", "date": "2026-01-01"}
    monkeypatch.setattr(record, "conditions", lambda: known)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "true")
    monkeypatch.setattr(sanitize, "build_host", lambda folder: None)
    monkeypatch.setattr(sanitize, "SAVE_SECONDS", -1)
    save, load = record.save, record.load
    monkeypatch.setattr(record, "save", lambda *args, **options: save(*args, **options, root=tmp_path))
    monkeypatch.setattr(record, "load", lambda stem, kind, device: load(stem, kind, device, tmp_path))
    looked = []

    def look(mutant, programs, keep, gpu):
        looked.append(mutant.id)
        if len(looked) == 3:
            raise KeyboardInterrupt
        named = {"mutant": mutant.id, "stem": mutant.stem, "line": 0, "bug": "none", "digest": mutant.digest}
        return named | dict.fromkeys(words.TOOLS, "clean")

    monkeypatch.setattr(sanitize, "look", look)
    with pytest.raises(KeyboardInterrupt):
        sanitize.record_on_gpu(ids, 1, 100, tmp_path, None)
    assert set(sanitize.recorded("NVIDIA H200")["mutant"]) == set(looked[:2])
    sanitize.record_on_gpu(ids, 1, 100, tmp_path, None)
    assert sorted(looked) == sorted([*ids, looked[2]]) and len(sanitize.recorded("NVIDIA H200")) == 3


def test_programs_are_spread_over_the_gpus_there_are(tmp_path, tool, monkeypatch):
    """Two at a time, and each GPU has one of them."""
    tool(f'echo "$CUDA_VISIBLE_DEVICES" >> {tmp_path}/seen; sleep 0.3; echo "ERROR SUMMARY: 0 errors"')
    known = {"device": "NVIDIA H200", "date": "2026-01-01"}
    monkeypatch.setattr(record, "conditions", lambda: known)
    monkeypatch.setattr(sanitize, "build_host", lambda folder: None)
    monkeypatch.setattr(sanitize, "build", lambda mutant, folder: folder / mutant.digest)
    save, load = record.save, record.load
    monkeypatch.setattr(record, "save", lambda *args, **options: save(*args, **options, root=tmp_path))
    monkeypatch.setattr(record, "load", lambda stem, kind, device: load(stem, kind, device, tmp_path))
    ids = ["01.original", "02.original", "03.original", "04.original"]
    sanitize.record_on_gpu(ids, 2, 100, tmp_path, None, gpus=2)
    seen = (tmp_path / "seen").read_text().split()
    assert len(sanitize.recorded("NVIDIA H200")) == 4
    assert seen.count("0") == seen.count("1") == 2 * len(words.TOOLS)
    assert set(seen[:2]) == {"0", "1"}


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A program in the place of compute-sanitizer that runs the shell script it is given."""

    def make(script: str):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(path))

    return make


def test_a_program_that_never_ends_is_stopped_and_so_is_what_it_started(tmp_path, tool):
    tool("echo '========= COMPUTE-SANITIZER'; sleep 600 & echo $! > " + f"{tmp_path}/child; wait")
    program = tmp_path / "04.x"
    assert sanitize.sanitize(program, [], "memcheck", seconds=0.5, keep=tmp_path) == "timeout"
    child = (tmp_path / "child").read_text().strip()
    done = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True)
    assert done.stdout.strip()[:1] in ("", "Z")
    assert "COMPUTE-SANITIZER" in (tmp_path / "04.x.memcheck.txt").read_text()


def test_the_xray_looks_where_it_has_not_looked_yet(tmp_path, monkeypatch):
    known = {"device": "NVIDIA H200", "date": "2026-01-01", "driver": "1"}
    rows = [
        {"mutant": m.id, "stem": m.stem, "line": m.line, "bug": m.bug, "digest": m.digest, "xray": xray}
        | dict.fromkeys(words.TOOLS, "clean")
        for m, xray in ((made.original("02_online_softmax"), ""), (ALL["03.barrier-removed.1"], "said before"))
    ]
    record.save("device", "sanitizer", pd.DataFrame(rows), known=known, root=tmp_path)
    save, load, about = record.save, record.load, record.about
    monkeypatch.setattr(record, "save", lambda *args, **options: save(*args, **options, root=tmp_path))
    monkeypatch.setattr(record, "load", lambda stem, kind, device: load(stem, kind, "NVIDIA H200", tmp_path))
    monkeypatch.setattr(record, "about", lambda stem, kind, device=None: about(stem, kind, "NVIDIA H200", tmp_path))
    monkeypatch.setattr(record, "DATA", tmp_path)
    sanitize.record_xray([], workers=1, missing=True)
    assert sanitize.recorded()["xray"].tolist() == ["clean", "said before"]
    sanitize.record_xray(["03.*"], workers=1)
    assert sanitize.recorded()["xray"].tolist()[1].startswith("uninitialised memory")
    assert record.about("device", "sanitizer")["driver"] == "1"


def test_what_was_found_before_the_timeout_counts(tmp_path, tool):
    tool("echo 'Barrier error detected. Divergent thread(s) in block'; sleep 600")
    program = tmp_path / "04.x"
    assert sanitize.sanitize(program, [], "synccheck", seconds=0.5).startswith("barrier: divergent thread(s) in block")


def test_a_mutant_becomes_a_program(tmp_path):
    program = sanitize.build(ALL["02.barrier-removed.1"], tmp_path)
    assert program.stat().st_size > 0 and program.name == ALL["02.barrier-removed.1"].digest
    built = program.stat().st_mtime_ns
    assert sanitize.build(ALL["02.barrier-removed.1"], tmp_path).stat().st_mtime_ns == built, "it was there"
    broken = made.Mutant("02.broken", "02_online_softmax", "", 1, "int broken = ;")
    with pytest.raises(RuntimeError, match="error"):
        sanitize.build(broken, tmp_path)
    done, wrong = sanitize.in_parallel(lambda mutant: sanitize.build(mutant, tmp_path), [broken], 2)
    assert not done and wrong[0].startswith("02.broken: ")

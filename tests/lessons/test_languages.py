"""The forward pass in other languages: each that runs on this machine, against float64 by the rule that kernels are held to."""

import ctypes
import functools
import itertools
import os
import re

import pandas as pd
import pytest
import torch

from helpers import check, record, reference
from helpers.ladder.paths import NOTEBOOKS
from helpers.lessons import languages, languages_timed, machine_code
from helpers.lessons.languages_timed import digest
from helpers.record import save
from helpers.record.schema import faults
from helpers.toolchain.compiler import find_compiler

EVERY = languages.implementations()
SLOW = ("flex_attention", "numba_kernel", "pallas_tiles", "torch_compile", "triton_tiles")  # a few cases, unless --all
COMPILED = ("flex_attention",)  # anew for each shape: one case
TOLD = 'Traceback\\n  File "a.py", line 1\\n    run()\\ntile.Error: Return code 5\\nfailed to compile\\nUnknown location\\n'
FEW = ("random, D=64", "N=1", "causal, Nq=1, Nk=70", "causal, Nq=70, Nk=1", "scale 0", "scale -0.3")


@pytest.mark.parametrize("stem", EVERY)
def test_is_right(stem, request, monkeypatch):
    found = EVERY[stem]
    if found.missing:
        pytest.skip(found.missing)
    if stem == "torch_compile" and not request.config.option.all:
        # As it is written: compiling it takes most of a minute.
        written = found.forward.__globals__
        monkeypatch.setitem(written, "attention", written["attention"].__wrapped__)
    cases = list(reference.cases(found, found.device))
    if found.device == "cpu" and stem == "triton_tiles":  # its interpreter has no products of bf16
        cases = [case for case in cases if "bf16" not in case.name]
    if stem in SLOW and not request.config.option.all:
        cases = [case for case in cases if re.sub(", (fp32|fp16)$", "", case.name) in FEW]
        assert len(cases) >= 5
        cases = [case for case in cases if "fp32" in case.name and "Nk=70" in case.name] if stem in COMPILED else cases
    check(found, cases).require()


def test_one_that_is_wrong_is_seen():
    found = EVERY["numpy_tiles"]

    def without_the_last_key(q, k, v, scale=None, causal=False):
        return found(q, k[:, :, :-1], v[:, :, :-1], scale, causal) if k.shape[2] > 1 else found(q, k, v, scale, causal)

    without_the_last_key.rung = found
    assert not check(without_the_last_key, itertools.islice(reference.cases(found), 8)).ok


def test_the_tile_does_not_change_the_answer(monkeypatch):
    found, case = EVERY["numpy_tiles"], next(reference.cases(EVERY["numpy_tiles"]))
    at_64, _ = found(case.q, case.k, case.v)
    monkeypatch.setitem(found.forward.__globals__, "Bc", 16)
    at_16, _ = found(case.q, case.k, case.v)
    assert not at_64.equal(at_16) and (at_64 - at_16).abs().max() < 1e-5


def test_the_reference_for_reading_is_short():
    assert EVERY["numpy_tiles"].lines < 40


def test_one_that_is_not_there_is_refused_by_name():
    with pytest.raises(LookupError, match="no implementation 'fortran'.*numpy_tiles"):
        languages.implementation("fortran")


def test_what_an_implementation_does_not_say_is_named(tmp_path):
    (tmp_path / "mine.py").write_text('"""Mine\n\nneeds: numpy\n"""\n')
    with pytest.raises(ValueError, match="does not say dtypes, runs"):
        languages._read(tmp_path / "mine.py")


# What the notebook shows of them


def test_each_decision_is_in_the_words_of_its_file():
    assert set(languages.SAID) == set(EVERY)
    for stem, said in languages.SAID.items():
        text = EVERY[stem].path.read_text()
        assert not [words for words in said if words not in ("", "–") and words not in text], stem
    assert languages.decisions().loc["torch_compile"].eq("compiler").all()


def test_the_regions_that_the_notebook_shows_are_there():
    text = (NOTEBOOKS / "src" / "40_every_language.py").read_text()
    shown = re.findall(r'languages\.region\("(\w+)", "(\w+)"\)', text)
    assert len(shown) >= 10
    for stem, name in shown:
        assert languages.region(stem, name).text.strip()
    with pytest.raises(KeyError, match="triton_tiles.py has no region 'softmax'; it has step, kernel, launch"):
        languages.region("triton_tiles", "softmax")


def test_a_variant_is_the_file_with_one_piece_changed():
    found = languages.variant("numpy_tiles", {"Br, Bc = 64, 64": "Br, Bc = 16, 32"})
    case = next(reference.cases(EVERY["numpy_tiles"]))
    assert found.forward.__globals__["Bc"] == 32 and check(found, [case]).ok
    with pytest.raises(ValueError, match="has 'np' .* times, not once"):
        languages.variant("numpy_tiles", {"np": "numpy"})


def test_a_variant_that_another_process_reads_stays_whole():
    change = {"Br, Bc = 64, 64": "Br, Bc = 16, 48"}
    path = languages.variant("numpy_tiles", change).path
    with path.open() as reading:
        languages.variant("numpy_tiles", change)
        assert os.fstat(reading.fileno()).st_ino != path.stat().st_ino
    assert [each.name for each in path.parent.glob(f"{path.stem}.*")] == [path.name]


def test_c_is_compiled_again_for_another_processor_or_by_a_newer_compiler(cache, tmp_path, monkeypatch):
    compiler, path = tmp_path / "c++", languages.implementation("c_openmp").path
    monkeypatch.setattr(languages, "find_compiler", lambda: str(compiler))
    real = find_compiler()
    for name in ("__ONE__", "__ONE__", "__OTHER__"):
        compiler.write_text(f'#!/bin/sh\nexec {real} -D{name} "$@"\n')
        compiler.chmod(0o755)
        languages._of_c(path)
    assert len(list(cache.glob("c_openmp_*/c_openmp.so"))) == 2


@pytest.mark.parametrize("lacking", ["-fopenmp", "-fopenmp|-march=native"])
def test_c_is_compiled_without_what_the_compiler_lacks(cache, tmp_path, monkeypatch, lacking):
    compiler = tmp_path / "c++"
    refuse = f'for flag; do case "$flag" in {lacking}) echo "unknown: $flag" >&2; exit 1;; esac; done'
    compiler.write_text(f'#!/bin/sh\n{refuse}\nexec {find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(languages, "find_compiler", lambda: str(compiler))
    forward = languages._of_c(languages.implementation("c_openmp").path)
    v = torch.randn(1, 1, 1, 64)
    assert torch.allclose(forward(v, v, v)[0], v)


def test_cuda_gets_a_scale_above_0_and_what_stands_in_for_one_below():
    """The launcher of a `.cu` file takes none that is 0 or less: Q is turned round, or zeros."""
    seen = []

    def attention(q, k, v, o, lse, *rest):
        first = ctypes.cast(q, ctypes.POINTER(ctypes.c_float))[0]
        seen.append((first, *rest[:4], round(rest[4].value, 3), *rest[5:7]))
        return 0

    run, q = languages.through(attention), torch.ones(1, 2, 3, 64)
    for scale in (-0.3, 0.0, None):
        run(q, q, q, scale, True)
    assert seen == [(first, 2, 3, 3, 64, scale, 1, 0) for first, scale in ((-1, 0.3), (0, 1.0), (1, 0.125))]


# What is recorded of them


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """A record as of a GPU in which triton_tiles is 1.5 and numba_kernel 0.1 times as fast as SDPA FLASH, and helion_tiles failed."""
    speeds = {"triton_tiles": 1.5, "numba_kernel": 0.1}
    rows = []
    for name, speed in speeds.items():
        for N in record.LENGTHS:
            for r in range(7):
                shape = (16384 // N, 16, N, N, 128)
                rows += [(name, "SDPA FLASH", "fp16", 0, *shape, r, N / 512 * (1 + r / 100))]
                rows += [(name, name, "fp16", 0, *shape, r, N / 512 * (1 + r / 100) / speed)]
    facts = [(n, n, "1", EVERY[n].lines, 1.0, 2.0, 9, "", "") for n in speeds]
    facts.append(("helion_tiles", *[None] * 7, "stopped after 150 s"))
    known = {"device": "NVIDIA H200", "driver": "580", "memory_mib": 1.0, "torch": "2", "cuda": "13", "python": "3"}
    monkeypatch.setattr(
        languages_timed.record, "save", functools.partial(save, known=known | {"date": "2026-01-31"}, root=tmp_path)
    )
    monkeypatch.setattr(languages_timed.record, "load", functools.partial(record.load, root=tmp_path))
    monkeypatch.setattr(languages_timed.record, "about", functools.partial(record.about, root=tmp_path))
    languages_timed._save("timings", pd.DataFrame(rows, columns=languages_timed.COLUMNS), {})
    languages_timed._save("facts", pd.DataFrame(facts, columns=languages_timed.FACTS), {})
    return tmp_path / "nvidia-h200"


def test_the_record_is_sound_and_says_how_fast_each_is(recorded):
    for kind in ("timings", "facts"):
        assert not faults(recorded / f"40_every_language.{kind}.csv")
    found = languages_timed.summary().set_index("name")
    assert found["ratio"].to_dict() == pytest.approx({"triton_tiles": 1.5, "numba_kernel": 0.1})
    assert found["lengths"].eq(5).all()  # from N = 1024 on
    assert languages_timed.fastest(128) == "triton_tiles"
    assert languages_timed.fastest(128, among=["numba_kernel"]) == "numba_kernel"
    words = languages_timed.scatter(languages_timed.summary()).in_words
    assert f"triton_tiles {EVERY['triton_tiles'].lines} lines 1.50" in words and "NVIDIA H200, D = 128" in words


def test_what_the_notebook_shows_of_the_facts(recorded):
    facts = record.load("40_every_language", "facts", root=recorded.parent)
    assert "triton_tiles 3.0 (1.0 + 2.0), numba_kernel 3.0" in languages_timed.waits(facts).in_words
    shown = languages_timed.checked(facts)
    assert shown.loc["triton_tiles", "cases"] == 9 and shown.loc["helion_tiles", "cases"] == ""
    assert shown.loc["helion_tiles", "ended"] == "stopped after 150 s"


def test_flex_attention_is_compiled_at_every_shape_that_is_timed():
    assert EVERY["flex_attention"].forward  # imported
    assert torch._dynamo.config.recompile_limit >= 4 * len(record.LENGTHS)


def test_an_implementation_that_has_changed_since_is_named(recorded, monkeypatch):
    assert languages_timed.stale() == []
    monkeypatch.setattr(languages_timed, "digest", lambda path: "another" if path.stem == "c_openmp" else digest(path))
    assert languages_timed.stale() == ["c_openmp"]
    monkeypatch.setattr(languages_timed, "stale", lambda: ["triton_tiles"])
    words = languages_timed.scatter(languages_timed.summary()).in_words
    assert "triton_tiles, changed since" in words and "numba_kernel, changed" not in words


def test_measuring_one_again_keeps_the_others(recorded):
    (kept,) = languages_timed._before("timings", ["numba_kernel"])
    assert set(kept["language"]) == {"triton_tiles"} and list(kept) == languages_timed.COLUMNS


def test_measuring_one_again_leaves_the_others_their_conditions_and_the_rungs_their_digest(recorded, monkeypatch):
    about = functools.partial(record.about, "40_every_language", "timings", root=recorded.parent)
    first, digests = about(), ["0" * 64]
    (rows,) = languages_timed._before("timings", ["nothing"])

    def again(name: str, date: str) -> dict:
        """The record after `name` was measured again, on a day when the rungs have changed."""
        known = {key: first[key] for key in ("device", "memory_mib", "torch", "cuda", "python")} | {"driver": "590"}
        monkeypatch.setattr(record.store, "_digest", lambda rungs: digests[0])
        saving = functools.partial(save, known=known | {"date": date}, root=recorded.parent)
        monkeypatch.setattr(languages_timed.record, "save", saving)
        new = rows[rows["language"] == "numba_kernel"].assign(language=name)
        frame = pd.concat([*languages_timed._before("timings", [name]), new])
        languages_timed._save("timings", frame, {"power_w": {"median": 600}}, [name])
        assert not faults(recorded / "40_every_language.timings.csv")
        return about()

    second = again("numba_kernel", "2026-02-01")
    assert (second["digest"], second["date"], second["driver"]) == (first["digest"], "2026-02-01", "590")
    (kept,) = second["earlier"].items()
    assert kept[0] == "triton_tiles" and (kept[1]["date"], kept[1]["driver"]) == ("2026-01-31", "580")
    assert "power_w" not in kept[1] and not {"method", "digest"} & set(kept[1])
    third = again("peers", "2026-03-01")
    dates = {language: each["date"] for language, each in third["earlier"].items()}
    assert third["digest"] == digests[0] and third["date"] == "2026-03-01"
    assert dates == {"triton_tiles": "2026-01-31", "numba_kernel": "2026-02-01"}
    assert third["earlier"]["numba_kernel"]["power_w"] == {"median": 600}


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo 'RuntimeError: no such instruction' >&2; exit 1", "RuntimeError: no such instruction"),
        (f"printf '{TOLD}' >&2; exit 1", "tile.Error: Return code 5 · failed to compile · Unknown location"),
        ("kill -9 $$", "exit status -9"),
        ("sleep 60", "stopped after 0 s"),
        ("exit 0", ""),
    ],
)
def test_a_language_whose_process_dies_costs_its_own_rows(does, said, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{'exec ' * does.startswith('sleep')}{does}\n")
    python.chmod(0o755)
    monkeypatch.setattr(languages_timed.sys, "executable", str(python))
    assert languages_timed._run("measure_one", "triton_tiles", str(tmp_path), 0.5) == said


def test_cutiles_compiler_gets_no_toolkit_of_another_version(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda-13.0")
    assert "CUDA_HOME" not in languages.environment("cutile_tiles")
    assert languages.environment("cute_mma")["CUDA_HOME"] == "/usr/local/cuda-13.0"


def test_what_the_compilers_made_is_recorded_of_each_that_needs_no_gpu():
    found = machine_code.load()
    assert list(found) == machine_code.COLUMNS
    wanted = {(name, D, causal) for name in machine_code.COMPILERS for D in (64, 128) for causal in (0, 1)}
    assert set(zip(found["name"], found["D"], found["causal"])) == wanted
    assert found["version"].str.fullmatch(r"[\w-]+ [\d.]+").all()
    assert (found["HGMMA"].gt(0) ^ found["HMMA"].gt(0)).all()
    assert set(found.query("stack_bytes > 0")["name"]) <= {"cute_dsl", "cute_mma"}  # as the notebook says
    assert (found[list(machine_code.INSTRUCTIONS)].sum(axis=1) < found["all"]).all()

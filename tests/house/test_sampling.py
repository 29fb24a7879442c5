"""What `make test` leaves out has not changed: the files whose tests are sampled, and what they depend on."""

import shutil
from types import SimpleNamespace

import conftest
import pytest
import torch
import unchanged

from helpers import reference, rung
from helpers.ladder.paths import ROOT

OF_LADDER = "from helpers.ladder.rung import rung\n"
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/test_*.py"))


@pytest.fixture
def checkout(tmp_path):
    """A small checkout with one file in every place that counts; gives its path, and a test file's digest there."""
    rooms = [f"helpers/{room}" for room in ("ladder", "run", "measure")]
    for part in (*rooms, "kernels", "data", "data/heads", "notebooks", "course", "docs", "tests/tools", "tests/run"):
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "file.py").write_text("one = 1\n")
    for file in ("pyproject.toml", "helpers/__init__.py", "tests/conftest.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "README.md").write_text("one\n")
    return tmp_path


def digest(checkout, text: str = OF_LADDER) -> str:
    unchanged._of_folder.cache_clear()
    path = checkout / "tests" / "run" / "test_it.py"
    path.write_text(text)
    return unchanged.digest(path, checkout)


@pytest.mark.parametrize("place", ["helpers/ladder", "helpers/run", "kernels", "data/heads", "tests/tools"])
def test_a_change_of_what_a_test_depends_on_runs_it_whole(checkout, place):
    before = digest(checkout)
    assert digest(checkout) == before
    (checkout / place / "file.py").write_text("one = 2\n")
    assert digest(checkout) != before


def test_a_change_of_a_room_above_does_not(checkout):
    before = digest(checkout)
    (checkout / "helpers" / "measure" / "file.py").write_text("one = 2\n")
    assert digest(checkout) == before
    assert digest(checkout, "from helpers import bench\n") != digest(checkout, "from helpers import bench  # \n")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (OF_LADDER, False),
        ("from helpers import record\n", True),
        ("from helpers import bench\n", True),
        ("import subprocess\n", True),
    ],
)
def test_a_change_of_a_record_counts_where_records_are_read(checkout, text, seen):
    before = digest(checkout, text)
    (checkout / "data" / "file.py").write_text("one = 2\n")
    assert (digest(checkout, text) != before) == seen


@pytest.mark.parametrize("place", ["notebooks/file.py", "course/file.py", "docs/file.py", "README.md"])
@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (OF_LADDER, False),
        ("from helpers.ladder.paths import NOTEBOOKS\n", True),
        ('COURSE = ROOT / "course"\n', True),
        ('TEXT = (ROOT / "README.md").read_text()\n', True),
    ],
)
def test_a_change_of_a_page_counts_where_pages_are_named(checkout, place, text, seen):
    before = digest(checkout, text)
    (checkout / place).write_text("one = 2\n")
    assert (digest(checkout, text) != before) == seen


def test_the_tests_of_notebooks_and_pages_name_them():
    for name in ("access", "book", "checks", "course", "glossary", "languages", "museum", "pairs", "pictures"):
        assert unchanged.reads_pages((ROOT / "tests" / "lessons" / f"test_{name}.py").read_text()), name
    assert unchanged.reads_pages((ROOT / "tests" / "run" / "test_doctor.py").read_text())


@pytest.mark.parametrize(
    ("text", "highest"),
    [
        (OF_LADDER, "run"),  # tests/tools use rooms up to run
        ("from helpers import bench, rung\n", "measure"),
        ("def test():\n    from helpers.evidence import verdicts\n", "evidence"),
        ("from helpers import museum\n", "lessons"),
        ("from helpers import magic\n", "commands"),
        ("import helpers\n", "commands"),
        ("import subprocess\n", "commands"),
    ],
)
def test_a_test_depends_on_the_highest_room_that_it_imports_from_and_all_below(text, highest):
    assert unchanged.depends(text)[-1] == highest
    assert unchanged.depends(text)[0] == "ladder"


def test_a_file_without_a_record_or_with_an_old_one_runs_whole():
    file = "tests/ladder/test_ladder.py"
    assert not unchanged.sampled(file, {})
    assert not unchanged.sampled(file, {file: "0" * 16})
    assert unchanged.sampled(file, {file: unchanged.digest(ROOT / file)})


def test_tests_that_read_everything_or_choose_by_themselves_are_never_sampled():
    here = {file: unchanged.digest(ROOT / file) for file in FILES}
    whole = {file for file in FILES if not unchanged.sampled(file, here)}
    assert whole == {*unchanged.OWN_WAYS, *(file for file in FILES if file.startswith("tests/house/"))}


def test_the_share_is_the_same_for_a_commit_and_in_time_every_test_is_in_it():
    nodes = [f"{file}::test_{i}" for file in FILES for i in range(10)]
    shares = [{node for node in nodes if unchanged.drawn(node, str(seed))} for seed in range(60)]
    assert shares[0] == {node for node in nodes if unchanged.drawn(node, "0")} != shares[1]
    assert set.union(*shares) == set(nodes)
    assert all(0.5 < unchanged.SHARE * len(share) / len(nodes) < 1.5 for share in shares)


def test_of_the_cases_of_some_dtypes_a_share_is_left(pytestconfig, monkeypatch):
    monkeypatch.setattr(pytestconfig.option, "seed", "a commit")
    for everything in (False, True):
        monkeypatch.setattr(pytestconfig.option, "all", everything)
        cases = [*reference.cases(rung("10"), "cpu", "small")]
        left = [case.q.dtype for case in unchanged.share(cases, "10", pytestconfig, ["bf16"])]
        whole = [case.q.dtype for case in cases]
        assert left.count(torch.float16) == whole.count(torch.float16) > 20
        few, many = left.count(torch.bfloat16), whole.count(torch.bfloat16)
        assert few == many if everything else many / 8 < few < many / 2


@pytest.mark.parametrize("same", [False, True])
def test_of_what_is_marked_a_share_runs_even_where_everything_has_changed_or_all_even_where_nothing_has(
    same, monkeypatch
):
    monkeypatch.setattr(unchanged, "sampled", lambda file, recorded: same)

    class Item:
        def __init__(self, n: int, mark: str) -> None:
            self.nodeid, self.get_closest_marker = f"tests/run/test_it.py::test[{mark}{n}]", mark.__eq__

    items = [Item(n, mark) for n in range(200) for mark in ("sampled", "always", "notebooks")]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    conftest._leave_a_share(SimpleNamespace(option=SimpleNamespace(seed="a commit"), hook=hook), items)
    left = [each.nodeid.partition("[")[2].rstrip("0123456789]") for each in items]
    assert left.count("always") == 200 and 30 < left.count("sampled") < 70
    assert 30 < left.count("notebooks") < 70 if same else left.count("notebooks") == 200


@pytest.mark.parametrize(
    ("keyword", "args", "kept"),
    [("", ["tests"], ["tests/a.py"]), ("one", ["tests"], []), ("", ["tests/a.py::test_one"], [])],
)
def test_a_file_is_recorded_as_passed_only_where_all_of_it_ran(keyword, args, kept, monkeypatch):
    found = []
    monkeypatch.setattr(unchanged, "keep", found.extend)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    reports = {"passed": [SimpleNamespace(nodeid="tests/a.py::test_one")]}
    reporter = SimpleNamespace(getreports=lambda kind: reports.get(kind, []))
    option = SimpleNamespace(all=True, record=True, keyword=keyword, markexpr="")
    plugins = SimpleNamespace(get_plugin=lambda name: reporter)
    config = SimpleNamespace(option=option, args=args, pluginmanager=plugins)
    conftest.pytest_sessionfinish(SimpleNamespace(config=config))
    assert found == kept

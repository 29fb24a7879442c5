"""A process uses the cores that it may use, not all that the machine has."""

import os

import pytest

from helpers.toolchain import cores as module
from helpers.toolchain.cores import cores


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(module, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def write(files: dict[str, str], own: str = "0::/\n") -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize(
    ("quota", "wanted"), [("200000", 2), ("150000", 2), ("50000", 1), ("800000", 8), ("6400000", 8), ("max", 8)]
)
def test_a_containers_share_is_rounded_up_and_no_more_than_there_are(cgroups, quota, wanted):
    cgroups({"cpu.max": f"{quota} 100000\n"})
    assert cores() == wanted


def test_of_nested_groups_the_lowest_limit_holds(cgroups):
    own = "0::/user.slice/jupyter.service\n"
    cgroups({"user.slice/jupyter.service/cpu.max": "max 100000\n", "user.slice/cpu.max": "300000 100000\n"}, own)
    assert cores() == 3
    cgroups({"user.slice/jupyter.service/cpu.max": "100000 50000\n"}, own)
    assert cores() == 2


@pytest.mark.parametrize(("quota", "wanted"), [("400000", 4), ("-1", 8)])
def test_version_1_of_control_groups(cgroups, quota, wanted):
    files = {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}
    cgroups(files, own="4:cpu,cpuacct:/docker/1\n1:name=systemd:/docker/1\n")
    assert cores() == wanted


def test_without_control_groups_those_it_is_bound_to(cgroups, monkeypatch):
    assert cores() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert cores() == 10

"""A rung's instances, each compiled by itself: the same numbers, the same findings at the same lines, in less time."""

import re

import pytest
import torch

from helpers import CompileError, KernelError, load, reference, rung, xray
from helpers.emulator import launcher
from helpers.run.kernel import Kernel

STEM = "10_fa2_mma_fp16"  # has six: D = 32, 64 and 128, fp16 and bf16


def inputs(D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 1, 40, D).to(dtype) for _ in range(3)]


@pytest.fixture
def cores(monkeypatch):
    return lambda number: monkeypatch.setattr(launcher, "cores", lambda: number)


def test_in_however_many_libraries_the_numbers_are_the_same(cache, cores):
    wanted = [(D, reference.DTYPES[dtype]) for D in (64, 128) for dtype in ("fp16", "bf16")]
    results = []
    for number, libraries in ((1, 1), (3, 2), (6, 6)):
        before = set(cache.glob(f"{STEM}_cpu_*/*.so"))
        cores(number)
        kernel = load(STEM, device="cpu", quiet=True)
        assert len(set(cache.glob(f"{STEM}_cpu_*/*.so")) - before) == libraries and not kernel.launcher.cached
        assert load(STEM, device="cpu", quiet=True).launcher.cached
        results.append([kernel(*inputs(*one)) for one in wanted])
    next(cache.glob(f"{STEM}_cpu_*/done")).unlink()
    loaded = []
    for number in (1, 3, 6):  # one of all these libraries has to be compiled again
        cores(number)
        loaded.append(load(STEM, device="cpu", quiet=True).launcher.cached)
    assert loaded.count(False) == 1
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(x, y) for other in others for x, y in zip(one, other, strict=True))


def test_an_x_ray_compiles_the_instance_that_it_runs_and_no_other(cache):
    kernel, multiplied = load(STEM, device="cpu", quiet=True), []
    for D, dtype, libraries in ((64, "fp16", 1), (64, "fp16", 1), (128, "fp16", 2), (128, "bf16", 3)):
        ray = xray(kernel, *inputs(D, reference.DTYPES[dtype]))
        multiplied.append(ray.trace.instructions["mma.sync"])
        assert ray.ok and len(list(cache.glob(f"{STEM}_xray_*/*.so"))) == libraries
    assert multiplied[2] == multiplied[3] == 2 * multiplied[0] == 2 * multiplied[1]


def test_together_one_library_runs_and_is_traced_for_all(cache):
    kernel = Kernel(rung(STEM), "cpu")
    kernel.launcher = launcher.Launcher(rung(STEM), together=True)
    kernel.launcher.share_build()
    for D, dtype in ((64, torch.float16), (128, torch.bfloat16)):
        kernel(*inputs(D, dtype))
        assert xray(kernel, *inputs(D, dtype)).ok
    assert len(list(cache.glob(f"{STEM}_*/*.so"))) == len(kernel.launcher.compile_traced()) == 1


def test_a_finding_has_its_line_in_every_library(cache, cores):
    barrier = "  __syncthreads(); // Q_smem is written before any warp reads it\n"
    racing, said = rung(STEM).replace(barrier, "\n"), set()
    for number in (1, 2, 6):
        cores(number)
        kernel = load(source=racing, device="cpu", quiet=True)
        for dtype in (torch.float16, torch.bfloat16):
            with pytest.raises(KernelError) as caught:
                kernel(*inputs(128, dtype))
            said.add(re.search(r"^.*:(\d+).*$", str(caught.value), re.MULTILINE)[1])
    (line,) = said
    assert "ldmatrix" in racing.splitlines()[int(line) - 1]


@pytest.mark.parametrize("number", [2, 6])
def test_a_compile_error_in_one_instance_is_told_once_with_its_line(cache, cores, number):
    cores(number)
    not_bf16 = '  static_assert(std::is_same<T, fa::fp16>::value, "fp16 alone");\n'
    anchor = "  constexpr int Bc = Tile<d>::Bc, Br = Tile<d>::Br;\n"
    line = rung(STEM).source.split(anchor)[0].count("\n") + 2
    with pytest.raises(CompileError, match=f"cell:{line}:.*fp16 alone") as caught:
        load(source=rung(STEM).replace(anchor, anchor + not_bf16), device="cpu", quiet=True)
    assert str(caught.value).count("error:") == 1

"""Builds, checks and times the variants of rung 23, the backward pass with mma.sync, beside SDPA FLASH, in under two minutes.

`python kernels/drafts/backward_mma_variants.py` (PYTHONPATH: the repository root) prints registers and spills of every variant, which
of them are right, and a table of ratios, FLASH's time over ours. Each variant is checked in a process of its own; those that are right
are then timed in one process, all interleaved. `--build-only` needs no GPU; `--only PATTERN` takes a regular expression.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
DRAFT, CLEAN, RUNG = HERE / "backward_mma.cu", HERE / "backward_mma_pairs.cu", HERE.parent / "23_backward_mma.cu"
POINTS = [(N, causal) for N in (4096, 1024, 16384, 512) for causal in (False, True)]

# name, source, macros, for which D, what is expected beside the rung
VARIANTS = [
    ("rung", RUNG, "", (64, 128), "D64 1.06, 1.09; D128 0.945, 0.94"),
    ("pairs", DRAFT, "", (64, 128), "D128 +15 % (1.08): 5120 instead of 6272 clocks of shared memory per step; D64 0"),
    ("clean", CLEAN, "", (64, 128), "as pairs prepare: the candidate for the rung, without macros"),
    ("pairs prepare", DRAFT, "PREPARE=1", (64, 128), "+2 % at N = 1024, 0 at 16384"),
    ("pairs prepare v4", DRAFT, "PREPARE=1 RED_V4=1", (64, 128), "0 to +3 %"),
    ("pairs prepare rotated", DRAFT, "PREPARE=1 ROTATED=1", (64, 128), "0 to +3 % without mask, where N is large; causal 0"),
    ("pairs prepare skip", DRAFT, "PREPARE=1 SKIP=1", (64, 128), "causal: +6 % at 1024, +1.5 % at 4096; without mask 0"),
    ("pairs prepare late", DRAFT, "PREPARE=1 LATE=1", (128,), "-2 to +2 %"),
    ("pairs prepare once", DRAFT, "PREPARE=1 ONE_BARRIER=1", (128,), "+3 to +6 % (225 KB)"),
    ("pairs prepare once v4", DRAFT, "PREPARE=1 ONE_BARRIER=1 RED_V4=1", (128,), "the two together"),
    ("pairs prepare keys64", DRAFT, "PREPARE=1 KEYS=64", (128,), "-5 to +5 %: two CTAs per SM, twice the additions"),
    ("pairs prepare keys64 v4", DRAFT, "PREPARE=1 KEYS=64 RED_V4=1", (128,), "the two together"),
    ("pairs no dQ (WRONG)", DRAFT, "PREPARE=1 NO_DQ=1", (64, 128), "what the additions to dQ cost: +3 to +8 %"),
    ("all", DRAFT, "PREPARE=1 SKIP=1 ROTATED=1 RED_V4=1", (64, 128), "all of it, with spills at D128"),
]  # fmt: skip


def build(variant: tuple, folder: Path) -> tuple[Path | None, str]:
    """The library, and what ptxas said of the two bf16 kernels."""
    from helpers import sass
    from helpers.build import _cudart_folder
    from helpers.toolkit import NVCC_FLAGS, find_compiler, find_toolkit, gencode

    name, source, macros, _, _ = variant
    toolkit = find_toolkit()
    library = folder / f"{re.sub(r'[^a-z0-9]', '_', name)}.so"
    flags = [flag for flag in NVCC_FLAGS if not flag.startswith("--split")] + [gencode("sm_90a"), "-ccbin", find_compiler()]  # fmt: skip
    flags += [f"-I{HERE.parent / 'include'}", *(f"-D{macro}" for macro in macros.split())]
    flags += ["-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "-cudadevrt", "none", f"-L{_cudart_folder(toolkit)}"]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(
        [toolkit.nvcc, *flags, source, "-o", library], capture_output=True, text=True, timeout=100, check=False
    )
    if done.returncode:
        error = re.search(r".*\berror\b.*", done.stderr + done.stdout)
        return None, error[0] if error else done.stderr[-200:]
    used = sass.parse_ptxas(done.stderr + done.stdout)
    said = []
    for D in (64, 128):
        row = used[[f"<{D}" in n and "bfloat16" in n and "backward_mma" in n for n in used.index]].iloc[0]
        said.append(f"D{D} {row.registers} registers, {row.spill_store_bytes + row.spill_load_bytes} B spilled")
    return library, f"{'; '.join(said)}; {time.perf_counter() - start:.1f} s"


def kernel(variant: tuple, library: str):
    from hopper_variants import Library

    from helpers.kernel import Kernel
    from helpers.ladder import parse

    return Kernel(parse(variant[1].read_text(), RUNG), "cuda", Library(library), 0.0)


def correct(variant: tuple, library: str) -> None:
    """In a process of its own: prints what is wrong."""
    import torch

    from helpers import check
    from helpers.reference import DTYPES, Case

    generator = torch.Generator("cuda").manual_seed(0)

    def case(name: str, B: int, H: int, Hkv: int, Nq: int, Nk: int, D: int, dtype: str, **options) -> Case:
        shapes = ((B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, D), (B, H, Nq, D))
        q, k, v, do = (torch.randn(s, generator=generator, device="cuda").to(DTYPES[dtype]) for s in shapes)
        return Case(f"{name}, D={D}, {dtype}", q, k, v, do=do, **options)

    found = []
    for D in variant[3]:
        for dtype in ("bf16", "fp16"):
            cases = [
                case("N=1024", 2, 20, 20, 1024, 1024, D, dtype),
                case("causal, N=1024", 2, 20, 20, 1024, 1024, D, dtype, causal=True),
                case("777 x 1300", 1, 3, 3, 777, 1300, D, dtype),
                case("causal, 1300 x 777", 1, 3, 3, 1300, 777, D, dtype, causal=True),
                case("6 heads on 2, causal", 2, 6, 2, 500, 700, D, dtype, causal=True),
                case("window", 1, 4, 2, 500, 500, D, dtype, causal=True, window=100),
                case("one row", 1, 2, 2, 1, 1, D, dtype),
            ]
            report = check(kernel(variant, library), cases)
            found += [c.explain().split("\n")[0] for c in report.comparisons if not c.ok]
    print("wrong: " + "; ".join(found[:3]) if found else "right")


def timed(libraries: dict[str, str]) -> None:
    """In a process of its own: a line per shape as it comes, and the table."""
    import pandas as pd
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from helpers.bench import measure

    of = {variant[0]: variant for variant in VARIANTS}
    kernels = {name: kernel(of[name], library) for name, library in libraries.items()}
    start = time.perf_counter()
    for D in (128, 64):
        rows: dict[str, dict[str, float]] = {}
        for N, causal in POINTS:
            torch.manual_seed(N)
            q, k, v, do = (
                torch.randn(16384 // N, 2048 // D, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)
            )
            leaves = [x.requires_grad_() for x in (q, k, v)]
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                q.detach(), k.detach(), v.detach(), 0.0, causal
            )[:2]
            inputs = (*(x.detach() for x in (q, k, v)), o, lse, do)
            calls = {n: functools.partial(f, *inputs, causal=causal) for n, f in kernels.items() if D in of[n][3]}
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
            calls["FLASH"] = functools.partial(torch.autograd.grad, out, leaves, do, retain_graph=True)
            samples = measure(calls, rounds=7 if N < 16384 else 5, burst_ms=3.0, seed=N)
            p = samples.pivot(index="round", columns="name", values="ms")
            column = f"{N}{' causal' * causal}"
            for name in calls:
                rows.setdefault(name, {})[column] = (p["FLASH"] / p[name]).median()
            rows.setdefault("FLASH ms", {})[column] = p["FLASH"].median()
            rows.setdefault("rung spread", {})[column] = (p["FLASH"] / p["rung"]).std() if "rung" in p else float("nan")
        table = pd.DataFrame(rows).T
        for title, ending in (("geomean", ""), ("geomean causal", " causal")):
            columns = [f"{N}{ending}" for N in (1024, 4096, 16384)]
            table[title] = table[columns].prod(axis=1) ** (1 / 3)
        pd.set_option("display.width", 250, "display.max_columns", None)
        print(
            f"\nD{D}, bf16: FLASH's time / ours, {time.perf_counter() - start:.0f} s\n{table.round(3).to_string()}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--worker", nargs="+")
    options = parser.parse_args()
    if options.worker:
        what, *rest = options.worker
        if what == "check":
            correct(next(v for v in VARIANTS if v[0] == rest[0]), rest[1])
        else:
            timed(dict(pair.split("=") for pair in rest))
        return

    start = time.perf_counter()
    variants = [v for v in VARIANTS if re.search(options.only, v[0])]
    folder = Path(tempfile.mkdtemp())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(lambda v: build(v, folder), variants))
    for variant, (_, words) in zip(variants, built):
        print(f"{variant[0]:24} {words}", flush=True)
    print(f"built in {time.perf_counter() - start:.0f} s", flush=True)
    if options.build_only:
        return

    def checked(variant: tuple, library: Path) -> str:
        worker = [sys.executable, __file__, "--worker", "check", variant[0], str(library)]
        try:
            done = subprocess.run(worker, capture_output=True, text=True, timeout=45, check=False)
        except subprocess.TimeoutExpired:
            return "hangs"
        return done.stdout.strip() or f"died: {done.stderr[-300:]}"

    ready = [(v, library) for v, (library, _) in zip(variants, built) if library]
    with ThreadPoolExecutor(7) as pool:
        said = list(pool.map(lambda pair: checked(*pair), ready))
    for (variant, _), words in zip(ready, said):
        print(f"{variant[0]:24} {words[:300]}; expected: {variant[4]}", flush=True)
    print(f"checked after {time.perf_counter() - start:.0f} s", flush=True)
    fit = [
        (v, l)
        for (v, l), words in zip(ready, said)
        if words == "right" or ("WRONG" in v[0] and words.startswith("wrong"))
    ]
    worker = [sys.executable, __file__, "--worker", "time", *(f"{v[0]}={library}" for v, library in fit)]
    left = max(30.0, 118 - (time.perf_counter() - start))
    try:
        done = subprocess.run(worker, timeout=left, stderr=subprocess.PIPE, text=True, check=False)
        print(done.stderr[-600:] if done.returncode else f"done in {time.perf_counter() - start:.0f} s")
    except subprocess.TimeoutExpired:
        print("out of time")


if __name__ == "__main__":
    main()

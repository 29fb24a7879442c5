"""Builds, checks and times variants of the fp32 backward kernel beside SDPA MATH and EFFICIENT, all in one process.

`python kernels/drafts/backward_fp32_variants.py [--only REGEX] [--seconds 110] [--build-only]` from the repository root.
Each variant is checked in a process of its own first (one that hangs or is wrong is left out); diagnostics, wrong on
purpose, are not checked. A table per shape appears as soon as it has been measured: peer's time / ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE)]
POINTS = [(4096, False), (1024, False), (1024, True), (4096, True), (512, False), (512, True), (16384, False)]


@dataclass
class Variant:
    name: str
    expected: str
    file: str = "backward_fp32_transposed"
    define: dict = field(default_factory=dict)
    replace: tuple = ()
    sizes: tuple = (64, 128)
    diagnostic: bool = False

    def source(self, D: int) -> str:
        folder = HERE if (HERE / f"{self.file}.cu").exists() else HERE.parent
        text = (folder / f"{self.file}.cu").read_text()
        for old, new in self.replace:
            assert text.count(old) == 1, f"{self.name}: {old!r} stands {text.count(old)} times"
            text = text.replace(old, new)
        for other in {32, 64, 128} - {D}:
            text = text.replace(f"  case {other}:\n    return launch<{other}>(a, stream);\n", "")
        head, _, tail = text.partition("#i")  # the first #if or #include
        return head + "".join(f"#define {k} {v}\n" for k, v in self.define.items()) + "#i" + tail


def variants() -> list[Variant]:
    keep = "backward_fp32_keep"
    stay, two_b = (
        "backward_fp32_stay",
        (
            (
                "    for (int c = 0; c < N; ++c) {\n      float b_reg[4];\n      fa::load4(b_reg, B_smem + c * TX * ld + k);\n",
                "    for (int c = 0; c < N; ++c) {\n"
                "      if (c + 1 < N) fa::load4(b_reg[(c + 1) % 2], B_smem + (c + 1) * TX * ld + k);\n",
            ),
            (
                "    for (int r = 0; r < M; ++r) fa::load4(a_reg[r], A_smem + r * TY * ld + k);\n",
                "    for (int r = 0; r < M; ++r) fa::load4(a_reg[r], A_smem + r * TY * ld + k);\n"
                "    float b_reg[2][4];\n    fa::load4(b_reg[0], B_smem + k);\n",
            ),
            (
                "for (int r = 0; r < M; ++r) acc[r][c] += a_reg[r][e] * b_reg[e];",
                "for (int r = 0; r < M; ++r) acc[r][c] += a_reg[r][e] * b_reg[c % 2][e];",
            ),
        ),
    )
    V = Variant
    return [
        V("rung", "0.60 D128, 0.82 D64", file="22_backward_fp32"),
        V("rung_b2", "rung +5 %: S and dP no longer wait for every load of B", file="22_backward_fp32", replace=two_b),
        V("stay_b1", "rung x 1.25: K and V stay, fetch is a quarter as long", file=stay, define={"B_BUF": 1}),
        V("stay", "stay_b1 +5 %", file=stay),
        V("stay_mixed4", "stay +0 to 1 %", file=stay, define={"MIXED_K": 4}),
        V("transposed", "40 TFLOP/s: 0.85 D128, 1.1 D64; stay +5 %"),
        V("transposed_b1", "-2 %: dQ waits for every load of B", define={"B_BUF": 1}),
        V("transposed_16", "+1 %; edits take longer", define={"COLS_UNROLL": 16}),
        V("transposed_4", "-4 %; edits are quicker", define={"COLS_UNROLL": 4}),
        V("transposed_red", "0 to +2 % at D128: dQ by red.add, no load to wait for", define={"RED": 1}),
        V("two_ctas", "D128: -3 to +5 %; slabs of 8, two CTAs hide each other's gaps", define={"TWO": 1}, sizes=(128,)),
        V("two_ctas_red", "as two_ctas, 0 to +1 %", define={"TWO": 1, "RED": 1}, sizes=(128,)),
        V("walk", "transposed +1 %: a pointer walks along a product's slabs", define={"WALK": 1}),
        V("two_ctas_walk", "two_ctas +2 %", define={"TWO": 1, "WALK": 1}, sizes=(128,)),
        V(
            "stagger",
            "D128: transposed +3 %: of a scheduler's two warps one multiplies while the other fetches",
            define={"STAGGER": 1},
        ),
        V("stagger_walk", "stagger +1 %", define={"STAGGER": 1, "WALK": 1}),
        V(
            "keep",
            "150 KB at D128, 81 at D64: K stays, V comes with dO; red",
            file=keep,
            define={"FAST": 0, "AGAIN": 0},
        ),
        V("keep_again", "keep, addresses formed again: no spills", file=keep, define={"FAST": 0, "AGAIN": 1}),
        V("kept", "keep, addresses in shared memory", file="backward_fp32_kept", define={"FAST": 0}),
        V("kept_add", "kept without red", file="backward_fp32_kept", define={"FAST": 0, "RED": 0}),
        V("kept_16", "kept, a slab unrolled", file="backward_fp32_kept", define={"FAST": 0, "COLS_UNROLL": 16}),
        V("kept_V", "216 KB: V stays too", file="backward_fp32_kept", define={"V_STAYS": 1, "FAST": 0}),
        V("no_wait", "diagnostic: what turns cost; 1 to 3 %, causal 10 %", define={"NO_WAIT": 1}, diagnostic=True),
        V("no_fetch", "diagnostic: what fetching costs; 5 to 8 %", define={"NO_FETCH": 1}, diagnostic=True),
    ]


def build(variant: Variant, D: int, folder: Path):
    """(library or None, words)"""
    from helpers import sass
    from helpers.build import _cudart_folder
    from helpers.toolkit import NVCC_FLAGS, find_compiler, find_toolkit, gencode

    toolkit, start = find_toolkit(), time.perf_counter()
    source, library = folder / f"{variant.name}_{D}.cu", folder / f"{variant.name}_{D}.so"
    source.write_text(variant.source(D))
    flags = [f for f in NVCC_FLAGS if not f.startswith("--split")] + [gencode("sm_90a"), f"-I{ROOT}/kernels/include"]
    flags += ["-ccbin", find_compiler(), "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "-cudadevrt", "none"]
    command = [toolkit.nvcc, *flags, f"-L{_cudart_folder(toolkit)}", source, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        return None, (done.stderr + done.stdout)[-200:]
    used = sass.parse_ptxas(done.stderr + done.stdout)
    mine = used[["backward" in n for n in used.index]].max()
    spilled = int(mine.spill_store_bytes + mine.spill_load_bytes)
    return str(library), f"{int(mine.registers)} registers, {spilled} B spilled, {time.perf_counter() - start:.1f} s"


def kernel_of(variant: Variant, D: int, library: str):
    import hopper_variants as hv

    from helpers.kernel import Kernel
    from helpers.ladder import parse

    return Kernel(parse(variant.source(D), Path(f"{variant.file}.cu")), "cuda", hv.Library(library), 0.0)


def check_one(name: str, D: int, library: str) -> None:
    """In a process of its own; prints a line of JSON."""
    import torch

    from helpers import check
    from helpers.reference import Case

    kernel = kernel_of(next(v for v in variants() if v.name == name), D, library)
    generator = torch.Generator("cuda").manual_seed(0)

    def case(words, B, H, Hkv, Nq, Nk, **options):
        shapes = ((B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, D), (B, H, Nq, D))
        q, k, v, do = (torch.randn(s, generator=generator, device="cuda") for s in shapes)
        return Case(words, q, k, v, do=do, **options)

    cases = [
        case("N=1024", 2, 20, 20, 1024, 1024), case("causal", 2, 20, 20, 1024, 1024, causal=True),
        case("777 x 1300", 1, 3, 3, 777, 1300), case("causal 1300 x 777", 1, 3, 3, 1300, 777, causal=True),
        case("6 heads on 2", 2, 6, 2, 500, 700, causal=True), case("window", 1, 4, 4, 900, 900, causal=True, window=200),
        case("one row", 1, 2, 2, 1, 1),
    ]  # fmt: skip
    report = check(kernel, cases)
    wrong = [c.explain().split("\n")[0][:100] for c in report.comparisons if not c.ok]
    q, k, v, do = (torch.randn(2, 8, 1024, D, device="cuda") for _ in range(4))
    from helpers.reference import same_precision

    o, lse = same_precision(q, k, v)
    first, again = (kernel(q, k, v, o, lse, do) for _ in range(2))
    torch.cuda.synchronize()
    if not all(torch.equal(x, y) for x, y in zip(first, again, strict=True)):
        wrong.append("two runs differ")
    print(json.dumps({"wrong": wrong[:2], "used": max(c.used for c in report.comparisons)}), flush=True)


def time_all(spec: str) -> None:
    import pandas as pd
    import torch

    from helpers.bench import measure
    from helpers.bench_model import _backward_peers
    from helpers.reference import same_precision

    spec = json.loads(spec)
    pd.set_option("display.width", 200)
    by_name = {v.name: v for v in variants()}
    tables: dict[int, dict] = {64: {}, 128: {}}
    for N, causal in POINTS:
        for D in (128, 64):
            if time.time() > spec["end"] - (25 if N > 8192 else 4) or not spec["built"].get(str(D)):
                continue
            torch.manual_seed(N)
            q, k, v, do = (torch.randn(16384 // N, 2048 // D, N, D, device="cuda") for _ in range(4))
            o, lse = same_precision(q, k, v, causal=causal)
            calls = {}
            for name, library in spec["built"][str(D)].items():
                if N > 8192 and (by_name[name].diagnostic or name not in spec["best"]):
                    continue
                call = kernel_of(by_name[name], D, library)
                calls[name] = functools.partial(call, q, k, v, o, lse, do, causal=causal)
            calls |= {
                n: c
                for n, c in _backward_peers(q, k, v, do, causal, "fp32").items()
                if n.split()[-1] in ("MATH", "EFFICIENT")
            }
            p = measure(calls, rounds=3 if N > 8192 else 5, burst_ms=8.0, seed=N).pivot(
                index="round", columns="name", values="ms"
            )
            flops = 10 * 16384 * 2048 * N * (0.5 if causal else 1)
            for name in calls:
                tables[D].setdefault(name, {})[f"{N}{'c' * causal}"] = (p["SDPA MATH"] / p[name]).median()
                if N == 4096 and not causal:
                    tables[D][name]["TFLOP/s"] = flops / p[name].median() / 1e9
            print(
                json.dumps(
                    {
                        "D": D,
                        "point": f"{N}{'c' * causal}",
                        "x": {
                            n: round(t[f"{N}{'c' * causal}"], 3)
                            for n, t in tables[D].items()
                            if f"{N}{'c' * causal}" in t
                        },
                    }
                ),
                flush=True,
            )
            del calls, q, k, v, o, lse, do
            torch.cuda.empty_cache()
    for D, rows in tables.items():
        t = pd.DataFrame(rows).T
        if not len(t):
            continue
        points = [c for c in t if c in ("1024", "4096", "1024c", "4096c")]
        t["geomean"] = t[points].prod(axis=1) ** (1 / max(1, len(points)))
        print(
            f"\nD={D}, x SDPA MATH (c: causal)\n{t.sort_values('geomean', ascending=False).round(3).to_string()}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--check", nargs=3)
    parser.add_argument("--time")
    options = parser.parse_args()
    if options.check:
        return check_one(options.check[0], int(options.check[1]), options.check[2])
    if options.time:
        return time_all(options.time)
    begin = time.time()
    folder = Path(tempfile.mkdtemp(prefix="backward-fp32-"))
    jobs = [(v, D) for v in variants() for D in v.sizes if re.search(options.only, f"{v.name} D{D}")]

    def prepared(job):
        v, D = job
        try:
            library, words = build(v, D, folder)
            if library is None or options.build_only or v.diagnostic:
                return v, D, library, words
            command = [sys.executable, __file__, "--check", v.name, str(D), library]
            done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=False)
            lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
            if done.returncode or not lines:
                return v, D, None, f"{words}; died: {(done.stderr or done.stdout).strip()[-160:]}"
            found = json.loads(lines[-1])
            words += f", {found['used']:.0%} of the error budget"
            return (
                v,
                D,
                None if found["wrong"] else library,
                words + (f"; WRONG {found['wrong']}" if found["wrong"] else ""),
            )
        except Exception as error:
            return v, D, None, f"{type(error).__name__}: {str(error)[-160:]}"

    built: dict = {}
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 2)) as pool:
        for v, D, library, words in pool.map(prepared, jobs):
            print(f"{v.name:15} D{D:<4}{words}   [{v.expected}]", flush=True)
            if library:
                built.setdefault(D, {})[v.name] = library
    print(f"{time.time() - begin:.0f} s", flush=True)
    if options.build_only or not built:
        return None
    spec = json.dumps(
        {"built": built, "end": begin + options.seconds, "best": ["rung", "walk", "keep", "kept", "kept_V"]}
    )
    with subprocess.Popen([sys.executable, __file__, "--time", spec], stderr=subprocess.PIPE, text=True) as timer:
        try:
            _, words = timer.communicate(timeout=max(10.0, begin + options.seconds + 8 - time.time()))
            if timer.returncode:
                print(words[-1500:])
        except subprocess.TimeoutExpired:
            timer.kill()
            print("out of time")
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()

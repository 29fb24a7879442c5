"""Builds, checks and times the variants of rung 33, the backward pass on Hopper, on this machine's GPU, in one call of under three minutes.

`python kernels/drafts/hopper_backward_variants.py` writes hopper_backward_variants.csv into $OUT (here if unset) and prints a table.
Options: `--build-only` (no GPU needed: registers, spills, warnings), `--only PATTERN`, `--seconds 165`.

As hopper_variants.py, whose builder and processes it uses: every variant runs in a process of its own, which is killed when it
hangs. A row of the csv is a variant at one length: its own time and those of SDPA CUDNN (and FLASH), interleaved in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import hopper_variants
from hopper_variants import AHEAD, ROOT, Built, Library, Variant, build, run, say, source_of

POINTS = [(4096, False), (4096, True), (1024, False), (1024, True), (16384, False), (16384, True)]  # fmt: skip

AHEAD_FILE = "33_backward_ahead"  # the rung in another order, with its choices as macros
TURNS_FILE = "33_backward_turns"  # in yet another: the warpgroups take turns at the tensor cores

PADDED = "dQ_sum (B,H,Nq384,D) fp32; stats (2,B,H,Nq384)"


def variants() -> list[Variant]:
    """All of them, the most important first: what does not fit into the time is left out at the end."""

    def ahead(D: int, name: str, expected: str, *replace: tuple[str, str], **define: int) -> Variant:
        return Variant(f"ahead{name}", D, expected, define, AHEAD_FILE, (*replace, *one_size(D)))

    def turns(D: int, name: str, expected: str, *replace: tuple[str, str], **define: int) -> Variant:
        return Variant(f"turns{name}", D, expected, define, TURNS_FILE, (*replace, *one_size(D)))

    rows_112 = (PADDED, PADDED.replace("384", "448"))
    return [
        turns(128, "_writer", "a warp that sends dQ, LSE and delta in accumulators: 1.14", WRITER=1),
        turns(64, "_128_writer", "the same, 128 queries: 1.15", BR64=128, WRITER=1),
        turns(128, "_plain", "1.08; dQ sent at once", WRITER=0, SEND=0, LSE_IN=0, EARLY_DELTA=0),
        turns(64, "_128", "1.10", BR64=128, WRITER=0, SEND=0, LSE_IN=0, EARLY_DELTA=0),
        turns(64, "_112_writer", "1.10", rows_112, BR64=112, WRITER=1),
        turns(128, "_free", "no token: - 5 %", TURNS=0, WRITER=1),
        turns(64, "_128_free", "no token: - 5 %", BR64=128, TURNS=0, WRITER=1),
    ]  # fmt: skip


def one_size(D: int) -> tuple[tuple[str, str], ...]:
    """The other D is not compiled."""
    other = 192 - D
    return ((f"  case {other}:\n    return launch<{other}>(a, stream);\n", ""),)


def header_for(variant: Variant, folder: Path) -> None:
    """fa/wgmma.cuh with every N that a variant needs, found before the checked-in one."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("wgmma", ROOT / "kernels" / "include" / "fa" / "wgmma.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (folder / "fa").mkdir()
    more = {32, 40, 56, 80, 112} - {*module.COLUMNS}
    (folder / "fa" / "wgmma.cuh").write_text(module.header((*module.COLUMNS, *sorted(more))))


# What differs from the forward pass's script: the header, and the script that its processes run.
hopper_variants.header_for, hopper_variants.__file__ = header_for, __file__


# --- a worker: one variant, in a process of its own


def check_cases(D: int):
    """A few that every part of the kernel has to be right for."""
    import torch

    from helpers.reference import DTYPES, Case

    generator = torch.Generator("cuda").manual_seed(0)

    def case(name: str, B: int, H: int, Hkv: int, Nq: int, Nk: int, dtype: str, **options) -> Case:
        shapes = ((B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, D), (B, H, Nq, D))
        q, k, v, do = (torch.randn(s, generator=generator, device="cuda").to(DTYPES[dtype]) for s in shapes)
        return Case(f"{name}, {dtype}", q, k, v, do=do, **options)

    for dtype in ("bf16", "fp16"):
        yield case("N=1024", 2, 20, 20, 1024, 1024, dtype)
        yield case("causal, N=1024", 2, 20, 20, 1024, 1024, dtype, causal=True)
        yield case("777 x 1300", 1, 3, 3, 777, 1300, dtype)
        yield case("causal, 1300 x 777", 1, 3, 3, 1300, 777, dtype, causal=True)
        yield case("6 heads on 2, causal", 2, 6, 2, 500, 700, dtype, causal=True)
        yield case("scale -0.3", 1, 2, 2, 300, 300, dtype, causal=True, scale=-0.3)
        yield case("one row", 1, 2, 2, 1, 1, dtype)


def work(variant: Variant, library: str) -> None:
    """Checks and times; every finding is a line of JSON. Waits for a line on stdin before it uses the GPU."""
    import functools

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from helpers import check
    from helpers.bench import measure
    from helpers.kernel import Kernel
    from helpers.ladder import parse

    torch.ones(1, device="cuda")
    say(ready=True)
    sys.stdin.readline()

    kernel = Kernel(parse(source_of(variant), Path(f"{variant.file}.cu")), "cuda", Library(library), 0.0)
    report = check(kernel, check_cases(variant.D))
    wrong = [c for c in report.comparisons if not c.ok]
    say(
        checked=len(report.comparisons),
        wrong=[c.explain().split("\n")[0] for c in wrong][:3],
        used=max(c.used for c in report.comparisons),
    )

    for N, causal in POINTS[:1] if variant.define.get("PROFILE") else POINTS:
        torch.manual_seed(N)
        B, H = 16384 // N, 2048 // variant.D
        q, k, v, do = (torch.randn(B, H, N, variant.D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention(q.detach(), k.detach(), v.detach(), 0.0, causal)[:2]
        calls = {"kernel": functools.partial(kernel, *(x.detach() for x in (q, k, v)), o, lse, do, causal=causal)}
        for name, backend in (("CUDNN", SDPBackend.CUDNN_ATTENTION), ("FLASH", SDPBackend.FLASH_ATTENTION)):
            if name == "CUDNN" or variant.flash:
                with sdpa_kernel(backend):
                    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
                calls[name] = functools.partial(torch.autograd.grad, out, leaves, do, retain_graph=True)
        samples = measure(calls, rounds=7, burst_ms=3.0, seed=N)
        if variant.define.get("PROFILE") and (N, causal) == (4096, False):
            profile(variant, library)
        ms = samples.groupby("name").ms.median()
        rounds = samples.pivot(index="round", columns="name", values="ms")
        ratios = rounds["CUDNN"] / rounds["kernel"]
        flops = 2.5 * 4 * B * H * N * N * variant.D * (0.5 if causal else 1)
        say(
            N=N, causal=causal, us=round(ms["kernel"] * 1e3, 2), tflops=round(flops / ms["kernel"] / 1e9, 1),
            x_cudnn=round(ms["CUDNN"] / ms["kernel"], 4), x_cudnn_low=round(ratios.min(), 4), x_cudnn_high=round(ratios.max(), 4),
            x_flash=round(ms["FLASH"] / ms["kernel"], 4) if variant.flash else None,
        )  # fmt: skip
    say(done=True)


PHASES = {0: "top", 1: "turn", 2: "dP, dV started", 3: "last dQ sent", 4: "dP done", 5: "dS stored", 6: "turn again", 7: "S, dK started",
          8: "dS of the other", 9: "dQ started", 10: "S done", 11: "exponentials", 12: "dQ done", 14: "last dQ has left", 13: "dQ stored"}  # fmt: skip


def profile(variant: Variant, library: str) -> None:
    """Of one CTA's steps 8 to 31, when each phase was over: mean and extremes of the cycles since the step began."""
    import ctypes

    import numpy as np
    import pandas as pd
    import torch

    torch.cuda.synchronize()
    stamps, ns, cycles = np.zeros((2, 64, 16), np.uint32), np.zeros((2, 2), np.uint64), np.zeros((2, 2), np.uint64)
    if ctypes.CDLL(library).fa_stamps(*(ctypes.c_void_p(x.ctypes.data) for x in (stamps, ns, cycles))):
        return
    rows = []
    for half in (0, 1):
        since = (stamps[half, 8:32] - stamps[half, 8:32, :1]).astype(np.int64)
        last = np.zeros(len(since), np.int64)
        for k, phase in PHASES.items():
            took = since[:, k] - last
            last = since[:, k]
            rows.append((half, phase, since[:, k].mean(), took.mean(), took.min(), took.max()))
        step = np.diff(stamps[half, 8:32, 0]).astype(np.int64)
        rows.append((half, "next top", step.mean(), step.mean() - last.mean(), step.min(), step.max()))
        ghz = float(cycles[half, 1] - cycles[half, 0]) / max(1.0, float(ns[half, 1] - ns[half, 0]))
        rows.append((half, f"loop at {ghz:.2f} GHz", *[float(cycles[half, 1] - cycles[half, 0])] * 4))
    skew = (stamps[1, 8:32] - stamps[0, 8:32]).astype(np.int32)
    rows.append((2, "half 1 behind half 0, top", *[skew[:, 0].mean()] * 2, skew[:, 0].min(), skew[:, 0].max()))
    table = pd.DataFrame(rows, columns=["half", "phase", "since_top", "took", "least", "most"])
    table.to_csv(Path(os.environ.get("OUT", ".")) / f"profile_{variant.name}_D{variant.D}.csv", index=False)


# --- the parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument(
        "--only", default="", help="a regular expression that the variant's name and D match: 'base D64'"
    )
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        fields = json.loads(options.worker[0])
        fields["replace"] = tuple(map(tuple, fields["replace"]))
        return work(Variant(**fields), options.worker[1])

    import pandas as pd

    begin = time.monotonic()
    chosen = [v for v in variants() if re.search(options.only, v.label)]
    gpu, folder = threading.Lock(), Path(tempfile.mkdtemp(prefix="hopper-backward-"))
    rows: dict[str, list[dict]] = {}
    out = Path(os.environ.get("OUT", ".")) / "hopper_backward_variants.csv"

    def one(variant: Variant, built) -> None:
        try:
            made: Built = built.result()
            if options.build_only:
                state = "built" if made.library else f"not built: {made.words}"
                rows[variant.label] = [{"variant": variant.name, "D": variant.D, **asdict(made), "status": state}]
            else:
                rows[variant.label] = run(variant, made, gpu, begin + options.seconds)
        except Exception as error:  # of one variant: the others go on
            rows[variant.label] = [
                {"variant": variant.name, "D": variant.D, "status": f"{type(error).__name__}: {error}"}
            ]
        ordered = [row for v in chosen for row in rows.get(v.label, [])]
        pd.DataFrame(ordered).to_csv(out, index=False)  # after every variant: whatever comes, these are kept

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as builders, ThreadPoolExecutor(AHEAD) as runners:
        builds = [(v, builders.submit(build, v, folder, not options.build_only)) for v in chosen]
        for future in [runners.submit(one, v, built) for v, built in builds]:
            future.result()

    frame = pd.DataFrame([row for v in chosen for row in rows.get(v.label, [])])
    pd.set_option(
        "display.width", 250, "display.max_rows", None, "display.max_columns", None, "display.max_colwidth", 90
    )
    if options.build_only or "x_cudnn" not in frame:
        keep = ["variant", "D", "registers", "spilled", "warnings", "seconds", "status"]
        print(frame[[c for c in keep if c in frame]].to_string(index=False))
    else:
        frame["point"] = [f"{int(N)}{'c' * bool(c)}" if N == N else "" for N, c in zip(frame.N, frame.causal)]
        for peer in ("x_cudnn", "us"):
            table = frame.dropna(subset=peer).pivot_table(index=["D", "variant"], columns="point", values=peer)
            table = table[[f"{N}{c}" for c in ("", "c") for N in (512, 1024, 4096, 16384) if f"{N}{c}" in table]]
            table["geomean"] = table.prod(axis=1, skipna=False) ** (1 / table.shape[1])
            facts = frame.groupby(["D", "variant"])[["spilled", "warnings", "error_used", "status"]].first()
            print(f"{peer}, bf16, backward; c: causal")
            print(table.join(facts).sort_values(["D", "geomean"], ascending=[True, False]).round(3).to_string())
        print(frame[frame.status != "ok"].groupby(["D", "variant"]).status.first().to_string())
    for table in sorted(out.parent.glob("profile_*.csv")):
        print(table.name, pd.read_csv(table).round(0).to_string(index=False), sep="\n")
    print(f"{time.monotonic() - begin:.0f} s; {out}")


if __name__ == "__main__":
    main()

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

FILE = "33_backward_wgmma"
POINTS = [(4096, False), (4096, True), (1024, False), (1024, True), (16384, False), (16384, True), (512, False), (512, True)]  # fmt: skip

# --- what is replaced in the rung. Each pair stands once in it.

NEXT_S = """\
    fa::mbarrier_wait(smem + C::Q_full + 8 * next, ahead / stages % 2);
    fa::wgmma_fence();
    product(S_reg, smem + C::K, smem + C::Q + next * C::q_bytes);
    fa::wgmma_commit_group();
"""
WAIT_S = "    fa::wgmma_wait_group<2>(); // S of the next step is there, dV has been added\n"
WAIT_DQ = "    fa::wgmma_wait_group<1>(); // dQ is there\n"
SCORES = "    scores(next, (tile + 1 == last ? first : tile + 1) * Br);\n"
DK = """\
#pragma unroll
    for (int k = 0; k < F; ++k)
      fa::wgmma_mma_async<T, 1>(dK_reg, A_reg[(k + F) % (F + 1)], fa::mn_major(Q_smem, Br) + fa::mn_major_step(k),
                                true);
    fa::wgmma_commit_group();
"""
SEND = "      fa::cp_reduce_async_bulk_add(dQ_sum, smem + dQ_smem, 4 * C::dQ_half);\n"
MAIN = "  backward_wgmma<d, T><<<unsigned(ctas), C::threads, C::smem_bytes, stream>>>(maps, a);\n"
ORDER = (
    ("j0 = blockIdx.x % key_tiles * Bc", "j0 = blockIdx.x / (a.B * a.Hkv) * Bc"),
    (
        "hk = blockIdx.x / key_tiles % a.Hkv, b = blockIdx.x / key_tiles / a.Hkv",
        "hk = blockIdx.x % a.Hkv, b = blockIdx.x / a.Hkv % a.B",
    ),
)


def registers_to_global(text: str) -> str:
    """dQ added up by red.global.add.v4.f32, straight from the accumulators: no shared memory, no barrier, no bulk copy."""
    start = text.index("    const uint32_t dQ_smem = C::dQ")
    end = text.index("    fa::wgmma_wait_group<0>(); // dK has been added")
    return (
        text[:start]
        + """\
    float *dQ_sum = static_cast<float *>(a.workspace[0]) + threadIdx.x % 128 * 4;
    dQ_sum += ((int64_t(b) * a.H + h) * padded<d>(a.Nq) + tile * Br) * d + half * C::dQ_half;
#pragma unroll
    for (int n = 0; n < C::dQ_columns / 8; ++n)
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dQ_sum + n * 512), "f"(dQ_reg[n][0]),
                   "f"(dQ_reg[n][1]), "f"(dQ_reg[n][2]), "f"(dQ_reg[n][3])
                   : "memory");
"""
        + text[end:]
    )


def variants() -> list[Variant]:
    """All of them, the most important first: what does not fit into the time is left out at the end."""
    source = source_of(Variant("rung", 128, "", file=FILE))

    def of(D: int, name: str, expected: str, *replace: tuple[str, str], flash: bool = False) -> Variant:
        return Variant(f"back_{name}", D, expected, file=FILE, replace=(*replace, *one_size(D)), flash=flash)

    start = source.index("    const uint32_t dQ_smem = C::dQ")
    end = source.index("    fa::wgmma_wait_group<0>(); // dK has been added")
    direct = registers_to_global(source)
    direct = (source[start:end], direct[start : direct.index("    fa::wgmma_wait_group<0>(); // dK has been added")])
    late_S = ((NEXT_S, ""), (WAIT_S, NEXT_S + "    fa::wgmma_wait_group<0>(); // everything\n"))
    rotated = (
        ("scores(0, first * Br);", "scores(0, start * Br);"),
        ("  int h = hk * group, tile = first;\n#pragma unroll 1", "  int h = hk * group, tile = start;\n#pragma unroll 1"),
        ("      int h = hk * group, tile = first;\n", "      int h = hk * group, tile = start;\n"),
        ("    if (++tile == last) tile = first, ++h;\n  }\n", "    if (++tile == last) tile = first;\n    if (tile == start) ++h;\n  }\n"),
        ("        if (++tile == last) tile = first, ++h;\n", "        if (++tile == last) tile = first;\n        if (tile == start) ++h;\n"),
        ("  extern __shared__", "  const int start = a.causal ? first : int(blockIdx.x) % key_tiles * last / key_tiles;\n\n  extern __shared__"),
    )  # fmt: skip
    both = [
        lambda D: of(D, "base", "1.05 to 1.15 x CUDNN, 0.85 to 1.0 at N = 512", flash=True),
        lambda D: Variant("back_persistent", D, "+8 % at N = 1024, +3 % at 4096; causal more, by its order", file="33_backward_persistent",
                          replace=one_size(D)),
        lambda D: of(D, "late_S", "S after dK, exponentials hidden by nothing of the same warpgroup: -10 %", *late_S),
        lambda D: of(D, "red_v4", "dQ from registers to L2: +3 % (512 cycles less of shared memory per step) or -5 %", direct),
        lambda D: of(D, "dK_early", "dK before the barrier: 0 to +2 %", (DK, ""), (NEXT_S, NEXT_S + DK), (WAIT_DQ, WAIT_DQ.replace("1", "0"))),
        lambda D: of(D, "heavy_first", "causal, N <= 4096: +2 to +5 %; without mask 0", *ORDER),
        lambda D: of(D, "rotated", "CTAs of a head add to different rows of dQ: 0 to +3 % without mask", *rotated),
        lambda D: of(D, "no_dQ", "WRONG dQ; what adding it up in the L2 costs: +3 %", (SEND, "")),
        lambda D: of(D, "no_vote", "descriptors moved for every product: -1 to -3 %",
                     ("__any_sync(0xffffffff, threadIdx.x >= 256)", "threadIdx.x >= 256")),
        lambda D: of(D, "around", "WRONG; prepare and finish alone: 100 us", (MAIN, "")),
        lambda D: of(D, "dV_at_once", "dS waits for all of dV: -2 %", ("wgmma_wait_group<F - k>", "wgmma_wait_group<0>")),
        lambda D: of(D, "3_stages", "0: two hide the latency of a copy", ("stages = 2;", "stages = 3;")),
        lambda D: of(D, "registers_232", "0, or spills", ("dec<24>", "dec<40>"), ("inc<240>", "inc<232>")),
    ]  # fmt: skip
    D64 = [
        of(64, "br_112", "+2 % at N >= 4096, -5 % at 1024 (1120 rows)", ("d == 64 ? 96", "d == 64 ? 112"),
           ("dQ_sum (B,H,Nq192,D) fp32; stats (2,B,H,Nq192)", "dQ_sum (B,H,Nq448,D) fp32; stats (2,B,H,Nq448)")),
        of(64, "br_80", "-4 %, better at N = 512", ("d == 64 ? 96", "d == 64 ? 80"),
           ("dQ_sum (B,H,Nq192,D) fp32; stats (2,B,H,Nq192)", "dQ_sum (B,H,Nq320,D) fp32; stats (2,B,H,Nq320)")),
        of(64, "br_64", "-10 %: shared memory is read more often", ("d == 64 ? 96", "d == 64 ? 64")),
    ]  # fmt: skip
    D128 = [of(128, "br_48", "-8 %", ("d == 64 ? 96 : 64", "d == 64 ? 96 : 48"))]
    first, rest = both[:7], both[7:]
    return [make(D) for make in first for D in (128, 64)] + D64[:1] + [make(D) for make in rest for D in (128, 64)] + D64[1:] + D128  # fmt: skip


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

    for N, causal in POINTS:
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


# --- the parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument(
        "--only", default="", help="a regular expression that the variant's name and D match: 'base D64'"
    )
    parser.add_argument("--seconds", type=float, default=165.0)
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
        for peer in ("x_cudnn", "x_flash"):
            table = frame.dropna(subset=peer).pivot_table(index=["D", "variant"], columns="point", values=peer)
            table = table[[f"{N}{c}" for c in ("", "c") for N in (512, 1024, 4096, 16384) if f"{N}{c}" in table]]
            long = [c for c in table if not c.startswith("512")]
            table["geomean"] = table[long].prod(axis=1) ** (1 / len(long))
            facts = frame.groupby(["D", "variant"])[["spilled", "warnings", "error_used", "status"]].first()
            print(f"{peer}, bf16, backward; c: causal")
            print(table.join(facts).sort_values(["D", "geomean"], ascending=[True, False]).round(3).to_string())
        print(frame[frame.status != "ok"].groupby(["D", "variant"]).status.first().to_string())
    print(f"{time.monotonic() - begin:.0f} s; {out}")


if __name__ == "__main__":
    main()

"""Writes the README's ladder table from data/: `python -m helpers.readme` (make readme); `--check` only compares."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from . import record
from .ladder import Rung, rungs

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- ladder -->", "<!-- /ladder -->"
DEVICE = record.DEFAULT_DEVICE
N = 4096  # where the table reads TFLOP/s


def table(root: Path = record.DATA) -> str:
    """The ladder as a Markdown table: rung, idea, speed at the headline workload, ratio to each peer."""
    device = _device_name(root)
    head = [
        f"| rung | the one idea | {device} | against its peers |",
        "|---|---|---|---|",
    ]
    foot = (
        f"\nTFLOP/s at B·N = 16384, H·D = 2048, N = {N}, for D = 64 and 128 (softmax: TB/s of S read and P written, at the "
        "same N). A ratio is the peer's time over the kernel's, so above 1 is faster than the peer: geometric mean over "
        "N ≥ 1024, with the worst and the best shape."
    )
    return "\n".join([*head, *(_row(r, root) for r in rungs()), foot])


def _device_name(root: Path) -> str:
    try:
        return record.load(None, "forward", DEVICE, root)["device"].iloc[0]
    except LookupError:
        return "NVIDIA H200"


def _row(rung: Rung, root: Path) -> str:
    name = f"[{rung.stem}](kernels/{rung.stem}.cu)"
    if (ROOT / "notebooks" / f"{rung.stem}.ipynb").exists():
        name += f" · [notebook](notebooks/{rung.stem}.ipynb)"
    return f"| {name} | {rung.idea} | {' | '.join(_figures(rung, root))} |"


def _figures(rung: Rung, root: Path) -> tuple[str, str]:
    try:
        samples = record.load(rung.stem, "forward", DEVICE, root)
    except LookupError:
        return "not recorded yet", ""
    medians = record.medians(record.headline(samples))
    here = medians[(medians["name"] == rung.stem) & (medians["Nk"] == N)].sort_values("D")
    if rung.op == "softmax":
        speed = " · ".join(f"{x:.2f}" for x in here["tb_per_s"]) + " TB/s"
    else:
        speed = " · ".join(f"{x:.3g}" for x in here["tflops"]) + " TFLOP/s"
    ratios = []
    for peer in samples["name"].unique():
        if peer != rung.stem:
            mean, low, high = record.overall(samples, rung.stem, peer)
            ratios.append(f"{mean:.2f} × {peer} ({low:.2f}–{high:.2f})")
    stale = " (stale: the kernel has changed since)" if samples["stale"].any() else ""
    return speed + stale, "<br>".join(ratios)


def rewritten(text: str, root: Path = record.DATA) -> str:
    """A README's text with the table between its markers renewed. ValueError if the markers aren't there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the README needs one {BEGIN} and after it one {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(root)}\n{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None, path: Path = ROOT / "README.md") -> int:
    """Rewrites the README; with --check prints the difference instead and returns 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m helpers.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the table is out of date")
    options = parser.parse_args(argv)
    old = path.read_text()
    new = rewritten(old)
    if options.check:
        difference = difflib.unified_diff(
            old.splitlines(), new.splitlines(), "README.md", "from data/", lineterm="", n=0
        )
        print("\n".join(difference) or "README.md is up to date")
        return int(old != new)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

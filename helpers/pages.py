"""What a program writes into README.md, data/README.md and CONTRIBUTING.md: tables and pictures from data/, the code and an X-ray.

A part stands between its markers, `<!-- ladder -->` and `<!-- /ladder -->`. Pictures are SVG files in docs/images/, one for light
pages and one for dark ones.
"""

from __future__ import annotations

import ast
import difflib
import html
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from .figures import style, svg
from .ladder.paths import ROOT
from .ladder.rung import rung
from .record import readme

HELPERS = ROOT / "helpers"
IMAGES = "docs/images"
XRAYED = "10_fa2_mma_fp16"


def made() -> dict[Path, str]:
    """Every file that a program writes, wholly or in part, as it should be now. Runs an X-ray: some seconds, more if the
    emulator has to be built."""
    files, parts = {}, {}
    for name, draw in (("staircase", staircase), ("xray", heat_strip), ("house", house)):
        drawing, description, caption = draw()
        for theme in style.THEMES:
            files[ROOT / IMAGES / f"{name}-{theme.name}.svg"] = drawing(theme)
        parts[name] = picture(name, description) + (f"\n\n{caption}" if caption else "")
    pages = {
        "README.md": {
            "staircase": parts["staircase"],
            "xray": parts["xray"],
            "ladder": readme.table(),
            "rooms": rooms(),
        },
        "data/README.md": {"details": readme.details()},
        "CONTRIBUTING.md": {"house": parts["house"]},
    }
    return files | {ROOT / path: rewritten((ROOT / path).read_text(), texts) for path, texts in pages.items()}


def update(files: Mapping[Path, str] | None = None, check: bool = False) -> dict[Path, str]:
    """Writes those of `files`, by default all of `made`, that change; each with its change as a diff. check: writes nothing."""
    changes = {}
    for path, new in (made() if files is None else files).items():
        old = path.read_text() if path.exists() else ""
        if old == new:
            continue
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), path.name, "as it should be", lineterm="", n=0)
        changes[path] = "\n".join(lines)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new)
    return changes


def rewritten(text: str, parts: Mapping[str, str]) -> str:
    """A page's text with the parts between their markers renewed. ValueError if a part's markers aren't there once each."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"the page needs one {begin} and after it one {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def picture(name: str, description: str) -> str:
    """HTML that shows the light or the dark picture, whichever suits the reader's page."""
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{IMAGES}/{name}-dark.svg">\n'
        f'  <img alt="{html.escape(description)}" src="{IMAGES}/{name}-light.svg" width="100%">\n'
        "</picture>"
    )


# Each picture: a function of the theme, its alternative text, a caption

Drawn = tuple[Callable[[svg.Theme], str], str, str]


def staircase(root: Path = readme.record.DATA) -> Drawn:
    """Every recorded attention rung and the public kernels, as a ratio to FlashAttention-2."""
    rungs = readme.figures(root).query("op != 'softmax'").dropna(subset="flash").assign(kind="rung")
    fp32 = readme.across_sessions(root).assign(kind="fp32")
    ours = pd.concat([fp32, rungs]).rename(columns={"rung": "name"}).sort_values(["name", "D"])
    steps = pd.concat([ours, readme.peers(root).assign(kind="peer")]).astype({"D": int})
    title = f"Speed relative to FlashAttention-2, {readme.device_name(root)}"
    at128 = steps[steps["D"] == 128]
    said = [
        f"{svg.GROUPS[group]}: " + ", ".join(f"{n} {x:.3f}" if x < 0.01 else f"{n} {x:.2f}" for n, x in points)
        for group, part in at128.groupby("group", sort=False)
        for points in [zip(part["name"], part["flash"], strict=True)]
    ]
    there = set(steps.loc[steps["kind"] == "peer", "name"])
    flash = [f"{short} (FlashAttention-{short[-1]})" for short in ("FA3", "FA4") if short in there]
    side_by_side = f"{' and '.join(['cuDNN', *flash])} ran beside the last rung; " if "cuDNN" in there else ""
    decode = rungs.loc[rungs["group"] == "decode", "rung"].unique()
    caches = "".join(f" ({stem[:2]}: over its caches of {readme.caches(stem, root)})" for stem in decode)
    caption = (
        "<sub>Higher is faster. Bars: the rungs; diamonds: public kernels. No causal mask, fp16; geometric mean over "
        f"N = 1024 … 16384{caches}. FlashAttention-2 is PyTorch's SDPA FLASH, timed side by side with each rung. It takes no fp32, so the "
        f"hatched fp32 rungs are set beside its fp16 time from another session on the same GPU. {side_by_side}"
        "Triton (tutorial 06) comes from an earlier study on an H200. 02 is a softmax and has no bar.</sub>"
    )
    words = f"{title}, D = 128. {'. '.join(said)}."
    return lambda theme: svg.staircase(steps, title, words, theme), words, caption


def heat_strip() -> Drawn:
    """What rung 10 does to shared memory, line by line."""
    from .run.reference import random_inputs
    from .run.xray import xray

    kernel = rung(XRAYED)
    ray = xray(kernel, *random_inputs(kernel, (1, 2, 256, 256, 64)))
    total, listing = ray.total(space="shared"), ray.source()
    lines = [number for number, _ in listing.lines if "shared" in listing.costs.get(number, {})]
    counts = ", ".join(f"line {n}: {listing.costs[n]['shared'][0]:,}" for n in lines)
    title = f"X-ray of rung {kernel.number}: {total.excess / total.cost:.0%} of its shared memory wavefronts are bank conflicts"
    caption = (
        f"<sub>Wavefronts per source line of [{kernel.stem}.cu](kernels/{kernel.stem}.cu), counted on the emulator: "
        f"{total.cost:,} for {total.requests:,} warp requests. [Rung 11](notebooks/11_swizzled.ipynb) removes the conflicts.</sub>\n\n"
        f"The counts are compared with an H200's hardware counters for every rung. {readme.seeded()}"
    )
    words = f"{title}. Wavefronts by {counts}."
    return lambda theme: svg.heat(listing, title, words, theme), words, caption


def house() -> Drawn:
    """The rooms of helpers/, from the order in pyproject.toml, their docstrings and their imports."""
    sentences = {room: sentence(room) for room in order()}
    arrows = imports(HELPERS)
    title = "The rooms of helpers/: each imports only rooms below it"
    words = f"{title}. From the top: {', '.join(sentences)}."
    return lambda theme: svg.rooms(sentences, arrows, title, theme), words, ""


def rooms() -> str:
    """The rooms as a Markdown table, the lowest first."""
    rows = [f"| `{room}/` | {sentence(room)} |" for room in reversed(order())]
    return "\n".join(["| room of `helpers/` | |", "|---|---|", *rows])


def order() -> list[str]:
    """The rooms from top to bottom, as pyproject.toml has them for import-linter."""
    return re.findall(r'^  "helpers\.(\w+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def sentence(room: str) -> str:
    """The first sentence of a room's docstring."""
    text = ast.get_docstring(ast.parse((HELPERS / room / "__init__.py").read_text())) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split()))[0]


def imports(helpers: Path) -> set[tuple[str, str]]:
    """(importer, imported) for every two rooms of which one imports from the other, at the top of a module or in a function."""
    rooms = {path.parent.name for path in helpers.glob("*/__init__.py")}
    found = set()
    for path in helpers.glob("*/**/*.py"):
        package = path.relative_to(helpers).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(package) + 1:
                base = [*package[: len(package) + 1 - node.level], *(node.module or "").split(".")]
                base = [part for part in base if part]
                targets = {base[0]} if base else {alias.name for alias in node.names}
                found |= {(package[0], target) for target in targets & rooms if target != package[0]}
    return found

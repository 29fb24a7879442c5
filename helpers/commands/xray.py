"""Shows what a kernel does to memory, line by line, and what is wrong with it; exits with 1 if something is.

The kernel runs on the emulator, so no GPU is needed. The inputs are random and small; they suit the kernel's header block, and
options change them. A file without a header block is taken for fp32 attention unless --op, --dtype and the masks say otherwise.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import add_inputs, add_kernel, described, inputs

if TYPE_CHECKING:
    from ..run.xray import Xray

EXAMPLES = (
    "xray 04",
    "xray mine.cu --dtype fp16 --N 130 --D 128",
    "xray 20 --causal --html xray.html",
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 75em; background: white; color: black }}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""


def options(parser: argparse.ArgumentParser) -> None:
    add_kernel(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the annotated source to FILE too")
    add_inputs(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..run.xray import xray

    page = arguments.html
    if page and not page.absolute().parent.is_dir():
        raise ValueError(f"--html {page}: there is no folder {page.parent}")
    rung = described(arguments)
    tensors, asked = inputs(rung, arguments, "cpu")
    ray = xray(rung, *tensors, **asked)
    print(ray)
    if page:
        page.write_text(_page(ray), encoding="utf-8")
        print(f"wrote {page}")
    return 0 if ray.ok else 1


def _page(ray: Xray) -> str:
    parts = [ray._repr_html_(), "<h2>The source</h2>", ray.source()._repr_html_()]
    return PAGE.format(title=html.escape(f"X-ray of {ray.rung.stem}"), body="\n".join(parts))

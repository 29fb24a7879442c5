"""Shows what a kernel does to memory, line by line, and what is wrong with it; exits with 1 if something is.

The kernel runs on the emulator, so no GPU is needed. The inputs are random and small; they suit the kernel's header block, and
options change them. A file without a header block is taken for fp32 attention unless --op, --dtype and the masks say otherwise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_inputs, add_kernel, described, inputs

EXAMPLES = (
    "xray 04",
    "xray mine.cu --dtype fp16 --N 130 --D 128",
    "xray 20 --causal --html xray.html",
)


def options(parser: argparse.ArgumentParser) -> None:
    add_kernel(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the annotated source to FILE too")
    add_inputs(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..run.xray import xray

    page = arguments.html
    if page and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise ValueError(
            f"--html {page}: " + ("it is a folder" if page.is_dir() else f"there is no folder {page.parent}")
        )
    rung = described(arguments)
    tensors, asked = inputs(rung, arguments, "cpu")
    ray = xray(rung, *tensors, **asked)
    print(ray)
    if page:
        print(f"wrote {ray.to_html(page)}")
    return 0 if ray.ok else 1

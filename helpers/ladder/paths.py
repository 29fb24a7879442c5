"""Where the parts of the checkout are."""

from __future__ import annotations

import codecs
import locale
import os
from pathlib import Path

from .errors import HELPERS, CheckoutError, ToolkitError

if not __debug__:
    raise ToolkitError("asserts, which judge exercises, are off: unset PYTHONOPTIMIZE, leave out -O and restart Python")
if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
    raise ToolkitError("this locale isn't UTF-8, and all files here are: set PYTHONUTF8=1 and restart Python")


def checkout() -> Path:
    """The folder that holds kernels/ and data/: the one that this package stands in, or, for an installed package, the current
    folder or the closest above it. Raises CheckoutError if there is none."""
    here = Path.cwd()
    for folder in (HELPERS.parent, here, *here.parents):
        if (folder / "kernels" / "include" / "fa").is_dir() and (folder / "data").is_dir():
            return folder
    raise CheckoutError(
        "kernels/ and data/ are not part of the installed package: "
        "start in a checkout of flashattention-notebooks, or install from one with `pip install -e .`"
    )


ROOT = checkout()
KERNELS = ROOT / "kernels"
STAGES = KERNELS / "stages"  # between a rung and the one before it: 13_1_addresses.cu, …
INCLUDE = KERNELS / "include"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"


def from_root(path: Path) -> str:
    """A path in the checkout as written from its root ("kernels/01_naive.cu"); any other path as it is."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def cache_folder() -> Path:
    """Where built libraries live: FA_CACHE, else flashattention-notebooks in the user's cache folder."""
    if chosen := os.environ.get("FA_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification ignores it then
        base = Path.home() / ".cache"
    return base / "flashattention-notebooks"

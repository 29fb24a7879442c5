"""Where the parts of the checkout are."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "helpers"
KERNELS = ROOT / "kernels"
INCLUDE = KERNELS / "include"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"


def from_root(path: Path) -> str:
    """A path in the checkout as written from its root ("kernels/01_naive.cu"); any other path as it is."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def cache_folder() -> Path:
    """Where built libraries live: FA_CACHE, else flashattention-notebooks in the user's cache folder."""
    if chosen := os.environ.get("FA_CACHE"):
        return Path(chosen).resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flashattention-notebooks"

"""Where the parts of the checkout are."""

from __future__ import annotations

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

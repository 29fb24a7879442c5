"""Where the parts of the checkout are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "helpers"
KERNELS = ROOT / "kernels"
INCLUDE = KERNELS / "include"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"

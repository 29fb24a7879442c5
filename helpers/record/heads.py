"""data/heads/: Q, K and V of a few heads of trained models, and how peaked each of a model's heads is.

A record is three files: <model>.npz (q, k, v as fp16, heads × N × D), <model>.csv (a row per head of the model, R, Bc and bound) and
<model>.json (the model, its licence, its input).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from .store import DATA

if TYPE_CHECKING:
    import numpy as np

FOLDER = "heads"


def save_heads(
    model: str, arrays: dict[str, np.ndarray], table: pd.DataFrame, about: dict, root: Path = DATA
) -> list[Path]:
    """Writes the record of a model, replacing an older one; the paths written. arrays: q, k, v (heads, N, D) fp16."""
    import numpy as np

    paths = [root / FOLDER / f"{model}.{kind}" for kind in ("npz", "csv", "json")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(paths[0], **arrays)
    table.to_csv(paths[1], index=False, float_format="%.4g", lineterminator="\n")
    paths[2].write_text(json.dumps(about, indent=2) + "\n")
    return paths


def models(root: Path = DATA) -> list[str]:
    """The models whose heads are recorded."""
    return sorted(path.stem for path in (root / FOLDER).glob("*.npz"))


def load_heads(model: str, root: Path = DATA) -> tuple[dict[str, np.ndarray], dict]:
    """q, k and v (heads, N, D) fp16 of a model, and what is known of them. LookupError if they aren't recorded."""
    import numpy as np

    path = root / FOLDER / f"{model}.npz"
    if not path.exists():
        raise LookupError(f"no heads of {model!r} are recorded; there are those of {', '.join(models(root)) or 'none'}")
    with np.load(path) as file:
        arrays = {name: file[name] for name in ("q", "k", "v")}
    return arrays, json.loads(path.with_suffix(".json").read_text())

"""Small images of a few colours, a pixel for each element, written without matplotlib, and their legends."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MOST_ROWS = 512
WIDE, HIGH = 640, 320  # CSS pixels that an image is enlarged to


def png(kinds: np.ndarray, colours: Sequence[str]) -> bytes:
    """A PNG file of `kinds`, rows by columns of indices into `colours` ("#rrggbb")."""
    rows, columns = kinds.shape
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in colours)
    lines = b"".join(b"\0" + row.tobytes() for row in kinds.astype("uint8"))

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = (
        chunk(b"IHDR", head) + chunk(b"PLTE", palette) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    )
    return b"\x89PNG\r\n\x1a\n" + chunks


def image(kinds: np.ndarray, colours: Sequence[str], words: str) -> str:
    """`kinds` as an HTML image, enlarged by a whole number, with `words` as its alternative text. Of more than MOST_ROWS rows
    several share a pixel's row, which shows the highest kind of them."""
    import numpy as np

    if len(kinds) > MOST_ROWS:
        kinds = np.stack([part.max(axis=0) for part in np.array_split(kinds, MOST_ROWS)])
    rows, columns = kinds.shape
    times = max(1, min(8, WIDE // columns, HIGH // rows))
    data = base64.b64encode(png(kinds, colours)).decode()
    style = (
        f"width:{columns * times}px;height:{max(rows * times, 10)}px;image-rendering:pixelated;border:1px solid #808890"
    )
    return f'<img style="{style}" alt="{html.escape(words)}" src="data:image/png;base64,{data}">'


def key(kinds: Sequence[tuple[str, str]]) -> str:
    """A legend as HTML: (colour, what it stands for)."""
    box = "display:inline-block;width:0.8em;height:0.8em;border:1px solid #808890;background:"
    return " &nbsp; ".join(f'<span style="{box}{colour}"></span> {html.escape(name)}' for colour, name in kinds)

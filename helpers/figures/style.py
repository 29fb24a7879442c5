"""The look of every figure: a light card that reads on any page, in print and without colour.

Every colour of a figure is defined here and has a name. The main ones are Okabe and Ito's, which colour-blind readers tell
apart; lines differ in marker and dash as well.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
import matplotlib.figure
from matplotlib.axes import Axes

CARD, INK, MUTED, GRID = "#fbfbfa", "#1c1c1c", "#5c5c5c", "#dcdcd8"
WHITE, DARK = "#ffffff", "#333333"
PALE, PALER, PALEST, OUTLINE, FAINT = (
    "#e4e4e0",
    "#e6e6e3",
    "#efefec",
    "#c4c4bf",
    "#b0b0aa",
)  # greys, for what is not in use
STYLE = {
    "figure.facecolor": CARD,
    "axes.facecolor": CARD,
    "savefig.facecolor": CARD,
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.7,
    "lines.markersize": 5.5,
    "hatch.linewidth": 0.8,
}
# colour, marker, dash: every pair differs in at least two of them; names stand in their line's colour, which is dark enough for text.
# Peers have theirs in every figure, and no rung has one that is like a peer's.
RUNGS = [
    ("#0072b2", "o", "-"),
    ("#c25100", "s", "-"),
    ("#0e7f5d", "^", "-"),
    ("#c2407a", "D", "-"),
    ("#000088", "v", "-"),
    ("#000000", "P", "-"),
    ("#5b5bd6", "X", "-"),
    ("#2020f0", "<", "-"),
    ("#b3261e", ">", "-"),
    ("#790046", "h", "-"),
    ("#8e24aa", "*", "-"),
    ("#3d005b", "p", "-"),
]
PEERS = {
    "SDPA MATH": ("#666666", "x", "--"),
    "SDPA EFFICIENT": ("#7b3fa0", "+", "-."),
    "SDPA FLASH": ("#8a6d00", "1", ":"),
    "SDPA CUDNN": ("#2f7f2f", "2", (0, (5, 1, 1, 1, 1, 1))),
    "flash_attn": ("#4a4ab0", "3", (0, (1, 1))),
    "torch.softmax": ("#666666", "x", "--"),
    "copy": ("#333333", "", (0, (1, 1.5))),
    "Triton tutorial 06": ("#a000f0", "4", (0, (3, 1))),
    "FA3": ("#c01f4f", "|", (0, (6, 2))),
    "FA4": ("#1f5f6b", "d", (0, (4, 1, 1, 1))),
    "flash_attention_from_scratch 16": ("#00708a", "_", (0, (2, 1))),
    "cuBLAS": ("#7a4d1d", "", (0, (8, 2, 2, 2))),
    "datasheet": ("#1c1c1c", "", "-"),
}

BLUE, ORANGE, GREEN, SAND = "#0072b2", "#d55e00", "#1b9e77", "#f0b060"
AMBER, BROWN, MAGENTA, VIOLET, MINT = "#b86a00", "#8a4b00", "#c2407a", "#5b5bd6", "#7fc8ae"
SHADES = ["#dcebf5", "#b5d5ea", "#8bbcdd", "#5fa1cd"]  # light enough for black text, a step of grey apart
TINTS = ["#dcebf5", "#fbe6cf", "#d9efe6", "#f3dbe6", "#c4dcec", "#f5d3ac", "#bfe3d5", "#e8c3d5"]  # one per register
QUARTERS = ["#a9cfe8", "#f6cd9c", "#a9dcc6", "#e5bcd3"]  # one per quarter of a warp, light enough for black text
WASTED = "#f7ddc8"  # moved, and not asked for
OVER = ["#fee08b", "#fdae61", "#f46d43", MAGENTA, "#6a1b6a"]  # above a limit, darker with every factor of ten
ERROR_COLOURS = (
    "#e6e6e3",
    "#fdae61",
    "#e0532b",
    "#a3195b",
    "#1c1c1c",
)  # right, up to 10 and 100 × the budget, more, NaN: ever darker
# Of HTML, which has no card of its own: both read on a light page and on a dark one.
HEAT = {"shared": "#2f80c8", "global": "#3d8a3d"}
EXCESS = "#d5672a"
COOL, HOT = "rgba(47,128,200,{:.2f})", "rgba(213,103,42,{:.2f})"  # behind a cell's number; format with their strength
DARK_PAGE, DARK_INK = "#16181c", "#d6d9de"  # a page of its own, where the reader prefers a dark one
# On such a page: for each of the listings' colours (ladder/show.py) one for a light theme and one for a dark one, the book's.
LISTINGS = {
    "#6f7a85": ("#4c5660", "#b6bfc8"),
    "#a65bcf": ("#843aae", "#d8b0f2"),
    "#b8651b": ("#8f4b0c", "#e3a160"),
    "#3d8a3d": ("#2a6a2a", "#84c784"),
    "#2f80c8": ("#1c609f", "#7bb9ec"),
    "#808890": ("#50575e", "#b6bdc4"),
}


DPI, CSS_DPI = 144, 96  # of the file, and of the page: 10 points are 13 pixels there, beside prose of 14
WIDEST = 940  # CSS pixels: what a window of 1024 leaves
MOST_WORDS = 1200  # characters of alternative text


class Figure(matplotlib.figure.Figure):
    """A matplotlib figure that shows itself in a notebook once, whatever back end is active: a PNG with `in_words` as its
    alternative text; in a terminal it is its words.

    in_words: what there is to see, in a sentence or a few. Whoever draws a figure writes them (`canvas(..., words=...)`); where
    nobody has, its titles, axes and labels are strung together (`described.described`).
    """

    in_words: str = ""

    def words(self) -> str:
        """What there is to see: `in_words`, or what can be said without knowing what the figure is for."""
        from .described import described

        return self.in_words or described(self)

    def png(self, dpi: int = DPI) -> bytes:
        """The figure as a PNG file's bytes, of at most 256 colours: a third of the size, and no eye sees it."""
        from PIL import Image

        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.15)
        image = Image.open(buffer).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        image.save(buffer, "png", optimize=True)
        return buffer.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict]:
        data = self.png()
        width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))  # the PNG's IHDR
        scale = min(CSS_DPI / DPI, WIDEST / width)
        alt = " ".join(self.words().split())
        alt = alt if len(alt) <= MOST_WORDS else alt[:MOST_WORDS].rpartition(" ")[0] + " …"
        return data, {"width": round(width * scale), "height": round(height * scale), "alt": alt}

    def __repr__(self) -> str:
        return self.words()

    __str__ = __repr__


class Picture(Figure):
    """A figure whose words say all that it shows, line by line, for the terminal."""


def styled(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Runs `function` with this module's style and leaves matplotlib's own settings alone."""

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> Figure:
        with matplotlib.rc_context(STYLE):
            return function(*args, **kwargs)

    return wrapper


def canvas(
    width: float, height: float, columns: int = 1, title: str = "", words: str = "", **options: object
) -> tuple[Figure, list[Axes]]:
    """A figure of `columns` axes side by side, inches; options go to `subplots`. words: its `in_words`, what there is to see."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.in_words = words
    axes = list(figure.subplots(1, columns, squeeze=False, **options)[0])
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, axes


def picture(text: str, width: float, height: float, title: str = "") -> tuple[Picture, Axes]:
    """A Picture of one axes, in inches, with its text form."""
    figure = Picture(figsize=(width, height), layout="constrained")
    figure.in_words = text
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, figure.subplots()


def blank(ax: Axes) -> Axes:
    """An axes without ticks, grid or frame."""
    ax.grid(False)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return ax


@dataclass(frozen=True)
class Theme:
    """Colours on a page's own background. Text has a contrast of 4.5 or more, marks of 3."""

    name: str
    ink: str
    muted: str
    grid: str
    halo: str  # the page, behind text that crosses lines
    strong: str  # bars, D = 128
    soft: str  # bars, D = 64
    peer: str
    excess: str
    card: str


LIGHT_THEME = Theme(
    "light", "#1f2328", "#59636e", "#d1d9e0", "#ffffff", "#0072b2", "#7fb8d8", "#b34700", "#d55e00", "#f6f8fa"
)
DARK_THEME = Theme(
    "dark", "#f0f6fc", "#9198a1", "#3d444d", "#0d1117", "#4aa8e0", "#2d6f9f", "#ffb077", "#ff8c42", "#151b23"
)
THEMES = (LIGHT_THEME, DARK_THEME)

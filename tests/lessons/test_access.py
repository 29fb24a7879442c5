"""What a reader without a mouse or with a screen reader needs: order of headings, names of links and controls, contrast of listings."""

import re
from pathlib import Path

import nbformat
import pytest

from helpers.figures import page, player, style
from helpers.ladder import show
from helpers.ladder.paths import NOTEBOOKS, ROOT

PAGES = [*sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")), *sorted((ROOT / "course").glob("*.md"))]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SILENT = {"here", "this", "link", "click here", "this link", "more"}
GROUNDS = {  # behind listings, in the book: plain lines, added ones, removed ones
    "light": ("f3f4f5", "cce3d1", "f4d3d3"),
    "dark": ("29313d", "2a473e", "52373f"),
}
AA = 4.5  # WCAG 2.1, 1.4.3


def text(path: Path) -> str:
    if path.suffix == ".md":
        return CODE.sub("", path.read_text())
    cells = nbformat.read(path, as_version=4).cells
    return CODE.sub("", "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_level_of_headings_is_skipped_and_links_say_where_they_lead(path):
    levels = [len(found) for found in re.findall(r"^(#+) ", text(path), re.MULTILINE)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below - above <= 1 for above, below in zip(levels, levels[1:])), levels
    links = re.findall(r"(?<!!)\[([^\]]*)\]\([^)]+\)", text(path))
    assert not [words for words in links if not words.strip() or words.strip().lower() in SILENT]
    assert not re.findall(r"!\[\]\(", text(path)), "a picture without words"


def test_every_control_of_the_tile_player_has_a_name_and_shows_its_focus():
    controls = re.findall(r"<(?:button|input)\b[^>]*>[^<]*", player.LIVE)
    assert len(controls) == 4
    assert all("aria-label=" in each or re.search(r">\s*\w+", each) for each in controls)
    assert "button:focus-visible" in player.LIVE and "input:focus-visible" in player.LIVE


def test_colours_of_listings_reach_contrast_aa_on_both_pages_of_the_book():
    css = (ROOT / "docs" / "book" / "book.css").read_text()
    shown = {*show.COLOURS.values(), re.search("#[0-9a-f]{6}", show.ASIDE)[0]}
    for number, (theme, grounds) in enumerate(GROUNDS.items()):
        rule = rf'html\[data-theme="{theme}"\] \.cell_output \[style\*="color:(#\w+)"\] {{ color: #(\w+) !important; }}'
        instead = dict(re.findall(rule, css))
        assert set(instead) == shown
        assert instead == {old: new[number].lstrip("#") for old, new in style.LISTINGS.items()}, "an X-ray's own page"
        assert all(f'[style*="color:{old}"] {{ color: #{new} ' in page.STYLE for old, new in instead.items())
        assert not [(c, g) for c in instead.values() for g in grounds if contrast(c, g) < AA]


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours, as six hexadecimal digits."""
    dark, light = sorted(luminance(colour) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))

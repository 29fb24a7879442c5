"""Regions are the file's own lines; a diff accounts for every line."""

import itertools
from pathlib import Path

import pytest

from helpers import show
from helpers.ladder.rung import Rung, rungs

SOURCE = """// mine: a kernel
//
// idea: nothing
#include <fa/args.cuh>

// [region: outer]
int a;
// [region: inner]
float b = 1.f; // half & <half>
// [end: inner]
int c;
// [end: outer]
"""


def made(source=SOURCE, stem="mine"):
    return Rung(stem=stem, path=Path(f"{stem}.cu"), source=source)


def test_a_region_has_the_file_s_lines_and_numbers():
    listing = show.region(made(), "outer")
    assert listing.text == "int a;\nfloat b = 1.f; // half & <half>\nint c;"
    assert [no for no, _, _ in listing.lines] == [7, 9, 11]
    assert "lines 7–11" in listing.title
    assert str(listing).splitlines()[1] == "    7 int a;"
    assert show.region(made(), "inner").text == "float b = 1.f; // half & <half>"


def test_a_missing_region_names_those_there_are():
    with pytest.raises(KeyError, match="mine has no region 'tile'; it has outer, inner"):
        show.region(made(), "tile")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("// [region: a]\nint x;\n", r"mine.cu:1: region 'a' begins here and never ends"),
        ("int x;\n// [end: a]\n", r"mine.cu:2: region 'a' ends here and never began"),
        ("// [region: a]\n// [end: a]\n// [region: a]\n// [end: a]\n", r"mine.cu:3: region 'a' is there twice"),
    ],
)
def test_broken_markers_are_named_by_line(source, complaint):
    with pytest.raises(ValueError, match=complaint):
        show.regions(made(source))


def test_every_rung_has_well_formed_regions_with_lines_in_them():
    for rung in rungs():
        found = show.regions(rung)
        assert found, rung.stem
        for name, (first, last) in found.items():
            assert last >= first, (rung.stem, name)
            lines = rung.source.splitlines()
            for no, _, text in show.region(rung, name).lines:
                assert lines[no - 1] == text


def test_a_listing_in_a_notebook_is_escaped_coloured_and_whole():
    page = show.region(made(), "inner")._repr_html_()
    assert "half &amp; &lt;half&gt;" in page
    assert f'<span style="color:{show.COLOURS["k"]}">float</span>' in page
    assert f'<span style="color:{show.COLOURS["c"]}">// half &amp;' in page
    assert "class=" not in page and "<style" not in page  # JupyterLab has classes of its own and drops style sheets
    for rung in rungs():
        assert strip(show.source(rung)._repr_html_()) == [t for _, _, t in show.source(rung).lines]


def strip(page):
    """The code lines of a listing's HTML, tags, numbers and escapes undone."""
    import html
    import re

    body = page[page.index(">") + 1 : page.index("</pre>")].split("\n")[1:]
    return [html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"^<span[^>]*> *\d+</span> ", "", line))) for line in body]


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_every_colour_reads_on_a_light_page_and_on_a_dark_one(page):
    def luminance(colour):
        channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in show.COLOURS.values():
        darker, lighter = sorted((luminance(colour), luminance(page)))
        assert (lighter + 0.05) / (darker + 0.05) >= 4, colour  # WCAG's contrast ratio


def test_a_diff_takes_the_one_file_to_the_other():
    stems = [r for r in rungs() if r.op == "attention"]
    for a, b in itertools.pairwise(stems):
        whole = show.diff(a, b, context=10**6).lines
        assert [t for _, sign, t in whole if sign in " +"] == [t for _, t in show._code(b)]
        removed = [(n, t) for n, sign, t in whole if sign == "-"]
        lines = a.source.splitlines()
        assert all(lines[n - 1] == t for n, t in removed)


def test_a_diff_shows_changes_with_their_context():
    before = made("\n".join(f"int x{i};" for i in range(20)))
    after = made(before.source.replace("int x10;", "int y10;"), "next")
    text = str(show.diff(before, after))
    assert text.splitlines() == [
        "mine.cu → next.cu · 1 lines changed",
        "      @ ⋯ 8 unchanged lines",
        "    9   int x8;",
        "   10   int x9;",
        "   11 - int x10;",
        "   11 + int y10;",
        "   12   int x11;",
        "   13   int x12;",
        "      @ ⋯ 7 unchanged lines",
    ]


def test_comments_indentation_and_header_are_no_change():
    before = made("// mine: a\n// idea: x\nint a;\nint b;\n")
    after = made("// mine: b\n// idea: y\n{\n  int a;\n  // why\n\n  int b;\n}\n", "next")
    assert show.changed(before, after) == 2  # the braces
    assert show.changed(before, before) == 0

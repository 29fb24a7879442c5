"""README.md, data/README.md, CONTRIBUTING.md and their pictures are what data/, the code and the X-ray say."""

import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import grimp
import pytest

from helpers import pages
from helpers.commands import COMMANDS
from helpers.figures import style, svg

ROOT = pages.ROOT
WRITTEN = ("README.md", "data/README.md", "CONTRIBUTING.md")
PICTURES = sorted((ROOT / pages.IMAGES).glob("*.svg"))
LINK = re.compile(r"\]\(([^)\s]+)\)|srcset=\"([^\"]+)\"|src=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def made():
    return pages.made()


def test_pages_and_pictures_are_up_to_date(made):
    changes = pages.update(made, check=True)
    assert not changes, "run `make readme`\n" + "\n".join(changes.values())
    assert {path for path in made if path.suffix == ".svg"} == set(PICTURES)


def test_a_picture_is_the_same_each_time_it_is_drawn(made):
    drawing, _, _ = pages.staircase()
    assert drawing(style.LIGHT_THEME) == made[ROOT / pages.IMAGES / "staircase-light.svg"]
    assert drawing(style.DARK_THEME) != drawing(style.LIGHT_THEME)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_small_and_describes_itself(path):
    assert path.stat().st_size < 20_000
    picture = ET.fromstring(path.read_text())
    names = [child.tag.rpartition("}")[2] for child in picture]
    assert names[:2] == ["title", "desc"] and all(child.text for child in list(picture)[:2])
    width, height = (float(picture.get(side)) for side in ("width", "height"))
    for element in picture.iter():
        x, y = (float(element.get(side, 0)) for side in ("x", "y"))
        assert 0 <= x <= width and 0 <= y <= height, ET.tostring(element)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", style.THEMES, ids=lambda theme: theme.name)
def test_text_and_marks_stand_out(theme):
    def contrast(colour: str, ground: str) -> float:
        low, high = sorted((luminance(colour), luminance(ground)))
        return (high + 0.05) / (low + 0.05)

    for ground in (theme.halo, theme.card):
        assert min(contrast(colour, ground) for colour in (theme.ink, theme.muted, theme.peer)) >= 4.5
        assert min(contrast(colour, ground) for colour in (theme.strong, theme.excess)) >= 3
    assert contrast(theme.soft, theme.strong) >= 1.5 and contrast(theme.soft, theme.halo) >= 2


def test_only_what_is_between_the_markers_changes():
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nbetween\n<!-- b -->\n<!-- /b -->\nafter\n"
    new = pages.rewritten(text, {"a": "1", "b": "2"})
    assert new == "before\n<!-- a -->\n1\n<!-- /a -->\nbetween\n<!-- b -->\n2\n<!-- /b -->\nafter\n"
    assert pages.rewritten(new, {"a": "1", "b": "2"}) == new
    for broken in ("no markers", text + text, "<!-- /a --> <!-- a -->"):
        with pytest.raises(ValueError, match="needs one <!-- a -->"):
            pages.rewritten(broken, {"a": "1"})


def test_a_check_writes_nothing_and_shows_the_change(tmp_path):
    page, new = tmp_path / "page.md", tmp_path / "pictures" / "new.svg"
    page.write_text("old\n")
    files = {page: "1\n", new: "2\n"}
    changes = pages.update(files, check=True)
    assert changes.keys() == {page, new} and "-old\n+1" in changes[page]
    assert page.read_text() == "old\n" and not new.exists()
    assert pages.update(files).keys() == {page, new}
    assert page.read_text() == "1\n" and new.read_text() == "2\n" and pages.update(files) == {}


def test_arrows_between_rooms_are_those_that_grimp_finds():
    """grimp, of import-linter, reads the imports in another way."""
    graph, rooms = grimp.build_graph("helpers"), set(pages.order())
    found = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = tuple([*name.split("."), ""][1] for name in (importer, imported))
            found |= {pair} if pair[0] != pair[1] and set(pair) <= rooms else set()
    assert found == pages.imports(pages.HELPERS) and len(found) > 20


def test_every_room_has_a_place_and_a_sentence():
    assert {path.parent.name for path in pages.HELPERS.glob("*/__init__.py")} == set(pages.order())
    for room in pages.order():
        assert pages.sentence(room).endswith("."), room


def test_an_import_upwards_is_drawn_in_orange(tmp_path):
    shutil.copytree(pages.HELPERS / "ladder", tmp_path / "ladder")
    shutil.copytree(pages.HELPERS / "record", tmp_path / "record")
    assert pages.imports(tmp_path) == {("record", "ladder")}
    with (tmp_path / "ladder" / "show.py").open("a") as file:
        file.write("\n\ndef late():\n    from .. import record\n    return record\n")
    both = pages.imports(tmp_path)
    assert both == {("record", "ladder"), ("ladder", "record")}
    drawn = svg.rooms({"record": "Data.", "ladder": "Kernels."}, both, "two rooms", style.LIGHT_THEME)
    assert drawn.count(style.LIGHT_THEME.excess) == 2  # the wire and its arrowhead


@pytest.mark.parametrize("page", WRITTEN)
def test_links_lead_somewhere(page):
    for target in (first or second or third for first, second, third in LINK.findall((ROOT / page).read_text())):
        if not re.match(r"https?://", target):
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path
            assert file.exists(), target
            heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}, target


@pytest.mark.parametrize("page", WRITTEN)
def test_commands_are_there(page):
    known = {module.__name__.rpartition(".")[2] for module in COMMANDS}
    text = (ROOT / page).read_text()
    assert set(re.findall(r"python -m helpers (\w+)", text)) <= known
    assert not re.search(r"python -m helpers\.", text)
    if page == "README.md":
        table = text.split("`python -m helpers …`")[1]
        assert set(re.findall(r"^\| `(\w+)[ `]", table.split("\n\n")[0], re.MULTILINE)) <= known


def test_files_that_contributing_names_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`([a-z]+/\w+\.(?:py|cpp|h))`", text):
        assert (pages.HELPERS / name).exists() or (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+\.(?:cpp|h))`", text):
        assert list((pages.HELPERS / "emulator").rglob(name)), name
    for folder in ("notebooks", "kernels", "data", "tests"):
        assert Path(ROOT / folder).is_dir() and f"{folder}/" in (ROOT / "README.md").read_text()

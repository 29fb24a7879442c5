"""The book in a browser: `make test-book`. Sphinx (`pip install '.[book]'`) builds it and Chromium opens its pages from the file
system; without one of the two this is left out."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import nbformat
import pytest

from helpers.ladder.paths import NOTEBOOKS

pytest.importorskip("sphinx")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
STEMS = sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "srcset", "video": "src"}


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    from helpers.lessons import book

    return book.build(tmp_path_factory.mktemp("book")).parent


def pages(site: Path) -> list[Path]:
    """The book's pages; _static holds a template of the theme as well."""
    found = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    assert len(found) > 40
    return found


class Page(HTMLParser):
    """What a page loads, links to and has an anchor for."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.images: list[dict] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found.get("id"), found.get("name")} - {None}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "img":
            self.images.append(found)
        rel = found.get("rel", "")
        if found.get(LOADS.get(tag, "")) and rel not in ("next", "prev", "index", "search", "canonical"):
            self.loads.append(found[LOADS[tag]])


parsed = functools.cache(Page)


def opened(page: str | Path, log: Path, *more: str) -> tuple[str, list[str]]:
    """A page's document after its scripts have run, and what it asked of other hosts."""
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-sync", "--disable-component-update"]
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", *quiet, "--virtual-time-budget=20000"]
    command += [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--log-net-log={log}",
        f"--user-data-dir={log.parent / 'user'}",
    ]
    page = page if isinstance(page, str) else page.as_uri()
    done = subprocess.run([*command, *more, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    asked = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    asked = [a["url"] for a in asked if "url" in a and a.get("initiator", "not an origin") != "not an origin"]
    return done.stdout, sorted({url for url in asked if not url.startswith(("file:", "data:", "chrome"))})


def test_every_page_loads_only_what_lies_beside_it(site):
    for path in pages(site):
        for target in parsed(path).loads:
            assert not re.match(r"(https?:)?//", target), f"{path.name} loads {target}"
            if not target.startswith("data:"):
                assert (path.parent / unquote(target.split("?")[0])).exists(), f"{path.name} loads {target}"
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(['\"]?|@import ['\"])(https?:)?//", path.read_text()), path.name


def test_every_link_inside_the_book_leads_somewhere(site):
    for path in pages(site):
        for link in parsed(path).links:
            target, anchor = urldefrag(link)
            if re.match(r"\w+:", target) or path.name in ("search.html", "genindex.html"):
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            assert there.is_file(), f"{path.name}: {link}"
            if anchor and there.suffix == ".html":
                assert unquote(anchor) in parsed(there).ids, f"{path.name}: {link}"


@pytest.mark.parametrize("stem", STEMS)
def test_figures_keep_their_words(site, stem):
    saved = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)
    pictures = [
        output
        for cell in saved.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {}) and "text/html" not in output["data"]
    ]
    words = [output["metadata"]["image/png"]["alt"] for output in pictures]
    shown = [image["alt"] for image in parsed(site / "notebooks" / f"{stem}.html").images if "alt" in image]
    assert all(text in shown for text in words if not text.startswith("<"))
    assert len(parsed(site / "notebooks" / f"{stem}.html").images) == len(shown)


@browser
@pytest.mark.parametrize("page", ["index", *(f"notebooks/{stem}" for stem in STEMS), "kernels/32_ping_pong"])
def test_opens_offline_with_its_maths(site, page, tmp_path):
    document, asked = opened(site / f"{page}.html", tmp_path / "net.json")
    assert asked == []
    written = len(re.findall(r'class="math', (site / f"{page}.html").read_text()))
    assert document.count("<mjx-container") >= written and '<g data-mml-node="merror"' not in document
    assert page.split("/")[0] != "notebooks" or page.endswith("_log") or written > 0
    folded = re.findall(r'<details class="(?:solution|[^"]*\bhide\b[^"]*)"[^>]*>', document)
    assert not [tag for tag in folded if " open" in tag]
    assert folded or not page.startswith("notebooks") or page.endswith("_log")


@browser
def test_search_finds_a_word_offline(site, tmp_path):
    document, asked = opened(f"{(site / 'search.html').as_uri()}?q=setmaxnreg", tmp_path / "net.json")
    assert asked == []
    found = document[document.index('id="search-results"') :]
    assert "31_warp_specialized" in html.unescape(found)


@browser
def test_listings_are_monospaced_and_paper_has_no_solutions(site, tmp_path):
    """Asked of the browser itself, by a script put behind the page. Nothing has to be scrolled on paper."""
    page = site / "notebooks" / "91_bug_museum.html"
    ask = (
        "<script>window.onload=()=>{const of=(s,p)=>[...document.querySelectorAll(s)].map(e=>getComputedStyle(e)[p]);"
        "document.body.dataset.fonts=[...new Set(of('.cell_output pre','fontFamily'))].join('|');"
        "for(const s of document.styleSheets)for(const r of s.cssRules)if(r.media&&r.media.mediaText=='print')r.media.mediaText='all';"
        "document.body.dataset.solutions=[...new Set(of('details.solution','display'))].join('|');"
        "document.body.dataset.cut=of('.cell_output pre','overflowX').concat(of('.cell_output .text_html','overflowX')).filter(x=>x!='visible').length"
        "}</script></body>"
    )
    copy = page.with_name("asked.html")
    copy.write_text(page.read_text().replace("</body>", ask))
    try:
        document, _ = opened(copy, tmp_path / "net.json", "--allow-file-access-from-files")
    finally:
        copy.unlink()
    fonts = html.unescape(re.search(r'data-fonts="([^"]*)"', document)[1]).split("|")
    assert fonts and all("mono" in font for font in fonts), fonts
    assert re.search(r'data-solutions="([^"]*)"', document)[1] == "none"
    assert re.search(r'data-cut="([^"]*)"', document)[1] == "0"


@browser
def test_a_walk_that_is_shown_twice_has_two_players(tmp_path):
    from helpers.emulator.steps import Rows, Step, Walk
    from helpers.figures.player import Player

    step = Step(0, read={"Q": Rows(0, 7, 1024)}, hbm=1024)
    shown = Player(Walk("04_fa2_fp32", 0, 8, 8, 32, "float32", (step,), {}))._repr_html_()
    page = tmp_path / "page.html"
    page.write_text(shown + shown)
    assert opened(page, tmp_path / "net.json")[0].count('<div class="tile-player-live">') == 2


@browser
def test_a_request_to_another_host_is_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<script src="https://example.org/x.js"></script><p>text')
    assert opened(page, tmp_path / "net.json")[1] == ["https://example.org/x.js"]
    assert parsed(page).loads == ["https://example.org/x.js"]

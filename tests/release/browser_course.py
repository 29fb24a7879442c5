"""A student's hour in JupyterLab and Chromium: `make test-browser`, or `python tests/release/browser_course.py [pictures/]`.

It builds a student tree, starts JupyterLab on it and drives Debian's Chromium (playwright, `pip install '.[browser]'`): runs all of 00 and 02
without an error, sees an exercise unsolved and then solves it, breaks a `%%region` and reads the line of the mistake, stops an endless
kernel and goes on in the same notebook, steps the tile player with the keyboard, and takes pictures on both themes. A request that
leaves the machine fails it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from executed import verdicts

from helpers.ladder.paths import NOTEBOOKS, ROOT
from helpers.lessons.course import trees
from helpers.lessons.course.exercises import exercises

STEMS = ("00_start_here", "02_online_softmax")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MINUTES = 15  # for a notebook on a busy machine
BROKEN = """%%region 02 merge -> mine
struct State { float m, l; };
__device__ State merge(State a, State b) {
  return {fmaxf(a.m, b.m), a.l + c.l};
}"""
ENDLESS = """%%kernel endless
#include <fa/args.cuh>
__global__ void turn(const fa_args a) {
  for (volatile int i = 0; i < 1; i = i * 1) {}
}
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  turn<<<1, 32, 0, stream>>>(*args);
  return cudaGetLastError();
}"""
PLAYER = """import torch
from helpers import tile_player
tile_player("04", *torch.randn(3, 1, 1, 256, 64))"""

CELLS = """() => { const cells = jupyterapp.shell.currentWidget.content.model.cells, found = [];
  for (let i = 0; i < cells.length; ++i) { const c = cells.get(i).toJSON();
    found.push({type: c.cell_type, source: [c.source].flat().join(""), outputs: c.outputs || []}); } return found; }"""


@contextmanager
def lab(tree: Path) -> Iterator[str]:
    """JupyterLab on a tree, with the settings and the extension of `make lab`; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = tree.parent / "jupyter"
    settings = own / "config" / "labconfig"
    settings.mkdir(parents=True)
    shutil.copy(tree / ".jupyterlab" / "overrides.json", settings / "default_setting_overrides.json")
    extension = own / "labextensions" / "flashattention-notebooks"
    shutil.copytree(tree / ".jupyterlab" / "extension", extension)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "JUPYTER_CONFIG_DIR": str(own / "config"),
        "OMP_NUM_THREADS": "1",
    }
    environment["FA_PROGRESS"] = str(own / "progress.json")
    options = [
        f"--port={port}",
        f"--ServerApp.root_dir={tree}",
        f"--LabApp.extra_labextensions_path={extension.parent}",
        f"--LabApp.workspaces_dir={own / 'workspaces'}",
        f"--LabApp.user_settings_dir={own / 'settings'}",
    ]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    log = (own / "log").open("wb")
    server = subprocess.Popen(
        [*command, "--IdentityProvider.token=", *options], cwd=tree, env=environment, stdout=log, stderr=log
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield address
    finally:
        server.terminate()
        server.wait(30)


class Notebook:
    """A notebook in JupyterLab."""

    def __init__(self, page: Page, address: str, stem: str) -> None:
        self.page = page
        page.goto(f"{address}/lab/tree/notebooks/{stem}.ipynb?reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
        ready = "() => jupyterapp.shell.currentWidget.sessionContext?.session?.kernel?.status === 'idle'"
        page.wait_for_function(ready, timeout=120_000)

    def cells(self) -> list[dict]:
        return self.page.evaluate(CELLS)

    def command(self, name: str, wait: bool = True) -> None:
        call = f"jupyterapp.commands.execute('{name}')"
        self.page.evaluate(f"async () => {{ {'await ' if wait else ''}{call} }}")

    def idle(self, seconds: float) -> None:
        """Waits until the kernel has nothing to do. TimeoutError of playwright after `seconds`."""
        still = """() => { const w = jupyterapp.shell.currentWidget, k = w.sessionContext.session.kernel;
          return k.status === 'idle' && !w.content.widgets.some(c => c.model.type === 'code' && c.prompt === '*') }"""
        self.page.wait_for_function(still, timeout=1000 * seconds, polling=1000)

    def type_into(self, index: int, text: str) -> None:
        """Replaces a cell's text by hand: click, select all, type."""
        self.page.evaluate(
            f"() => {{ const n = jupyterapp.shell.currentWidget.content; n.activeCellIndex = {index}; }}"
        )
        self.page.evaluate(f"async () => await jupyterapp.shell.currentWidget.content.scrollToItem({index}, 'center')")
        editor = self.page.locator(".jp-Cell.jp-mod-active .cm-content")
        editor.click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.press("Delete")
        self.page.evaluate(
            "text => jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.setSource(text)", text
        )

    def run(self, index: int, seconds: float = 120, wait: bool = True) -> str:
        """Runs a cell with Shift+Enter, as a reader does; what it printed."""
        self.page.evaluate(
            f"() => {{ const n = jupyterapp.shell.currentWidget.content; n.activeCellIndex = {index}; }}"
        )
        self.page.evaluate(f"async () => await jupyterapp.shell.currentWidget.content.scrollToItem({index}, 'center')")
        self.page.locator(".jp-Cell.jp-mod-active .cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        self.page.wait_for_timeout(500)
        if wait:
            self.idle(seconds)
        return said(self.cells()[index])

    def append(self, text: str) -> int:
        """A new cell at the end with this text; its index."""
        self.page.evaluate(
            "() => { const n = jupyterapp.shell.currentWidget.content; n.activeCellIndex = n.widgets.length - 1; }"
        )
        self.command("notebook:insert-cell-below")
        index = len(self.cells()) - 1
        self.type_into(index, text)
        return index


def as_notebook(cells: list[dict]) -> nbformat.NotebookNode:
    """What Notebook.cells gives, as a notebook."""
    joined = [c | {"outputs": [o | {"text": "".join(o.get("text", ""))} for o in c["outputs"]]} for c in cells]
    return nbformat.from_dict({"cells": [c | {"cell_type": c["type"]} for c in joined]})


def said(cell: dict) -> str:
    """The text of a cell's outputs."""
    parts = []
    for output in cell["outputs"]:
        parts.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
        parts += output.get("traceback", [])
    return "\n".join("".join(part) for part in parts)


def student(page: Page, address: str, pictures: Path) -> Iterator[tuple[str, bool, str]]:
    """What a student does: (what, whether it went well, what was seen)."""
    for stem in STEMS:
        book, start = Notebook(page, address, stem), time.monotonic()
        before = [c for c in book.cells() if c["outputs"]]
        yield f"{stem} is handed out without outputs", not before, f"{len(before)} cells with outputs"
        book.command("notebook:run-all-cells", wait=False)
        page.wait_for_timeout(2000)
        book.idle(60 * MINUTES)
        bad = [said(c) for c in book.cells() if any(o["output_type"] == "error" for o in c["outputs"])]
        yield f"{stem} runs to its end", not bad, "\n".join(bad)[:2000] or f"{time.monotonic() - start:.0f} s"
        found = verdicts(as_notebook(book.cells()))
        yield (
            f"{stem}: no exercise is solved",
            bool(found) and all(set(v) == {"not solved yet"} for v in found.values()),
            str(found),
        )
        for theme in ("JupyterLab Dark", "JupyterLab Light"):
            page.evaluate("async t => await jupyterapp.commands.execute('apputils:change-theme', {theme: t})", theme)
            page.wait_for_timeout(1500)
            page.screenshot(path=str(pictures / f"{stem}-{theme.split()[-1].lower()}.png"))
    whole = nbformat.read(NOTEBOOKS / f"{STEMS[-1]}.ipynb", as_version=4)
    number, each = next((n, each) for n, each in exercises(whole).items() if each.check is not None)
    cells = book.cells()
    opening = cells.index(next(c for c in cells if c["source"] == whole.cells[each.start].source))
    check = cells.index(next(c for c in cells if c["source"] == whole.cells[each.check].source))
    book.type_into(opening, each.solution(whole))
    book.run(opening)
    words = book.run(check)
    yield f"exercise {number} is solved", f"Exercise {number}: solved" in words, words

    book.run(book.append("%load_ext helpers"))
    words = book.run(book.append(BROKEN), 300)
    named = re.search(r"cell:4:\d+: error: .*c", words) and "Traceback" not in words
    yield "a broken %%region names the cell's line", bool(named), words[-600:]
    page.screenshot(path=str(pictures / "region-broken.png"))

    endless = book.append(ENDLESS)
    book.run(endless, wait=False)
    page.wait_for_timeout(20_000)
    busy = page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.status") == "busy"
    start = time.monotonic()
    book.command("notebook:interrupt-kernel")
    book.idle(120)
    seconds = time.monotonic() - start
    yield (
        "an endless kernel is stopped",
        busy and seconds < 60,
        f"busy: {busy}, {seconds:.1f} s; {said(book.cells()[endless])[-300:]}",
    )
    words = book.run(book.append('print("alive:", 6 * 7)'))
    yield "the notebook lives on", "alive: 42" in words, words
    words = book.run(check)
    yield "with what it knew", f"Exercise {number}: solved" in words, words

    book.run(book.append(PLAYER), 600)
    player = page.locator(".tile-player").last
    player.scroll_into_view_if_needed(timeout=30_000)
    told, seen = player.locator(".said"), []
    for label, key in (
        ("one step on", "Enter"),
        ("one step on", "Space"),
        ("one step back", "Enter"),
        ("step", "ArrowRight"),
    ):
        player.get_by_label(label, exact=True).focus()
        page.keyboard.press(key)
        page.wait_for_timeout(300)
        seen.append(int(re.match(r"Step (\d+)", told.inner_text())[1]))
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        page.evaluate("async t => await jupyterapp.commands.execute('apputils:change-theme', {theme: t})", theme)
        page.wait_for_timeout(1500)
        player.scroll_into_view_if_needed()
        page.screenshot(path=str(pictures / f"player-{theme.split()[-1].lower()}.png"))
    yield "the tile player steps by keyboard", seen == [2, 3, 2, 3], f"steps {seen}"


def main(pictures: str = "build/browser") -> int:
    if CHROMIUM is None:
        print("Chromium is needed (Debian, Ubuntu: apt install chromium)")
        return 1
    out, outside, failed = Path(pictures).resolve(), [], 0
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="student-") as folder:
        tree = trees.build(Path(folder), stems=STEMS).student
        with lab(tree) as address, sync_playwright() as play:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            mine = (address, address.replace("http", "ws", 1), "data:", "blob:")
            page.on("request", lambda r: outside.append(r.url) if not r.url.startswith(mine) else None)
            for what, well, seen in student(page, address, out):
                failed += not well
                print(
                    f"{'ok  ' if well else 'FAIL'} {what}: {json.dumps(seen[:1000] if not well else seen[:200], ensure_ascii=False)}",
                    flush=True,
                )
            browser.close()
    print(f"{'FAIL' if outside else 'ok  '} no request leaves the machine: {sorted(set(outside))[:5]}")
    return int(bool(failed or outside))


if __name__ == "__main__":
    assert ROOT.is_dir()
    sys.exit(main(*sys.argv[1:]))

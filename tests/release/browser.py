"""JupyterLab in Chromium, as a reader meets it: `make lab` must be running without a token, e.g.

    make lab LAB="--no-browser --port 8899 --IdentityProvider.token="
    python tests/release/browser.py http://127.0.0.1:8899 [pictures/]

Needs playwright (not in the environment of `make test`) and Chromium (Debian: apt install chromium). It opens a kernel and a notebook at
1024 and 1440 pixels and fails if a `.cu` isn't coloured, a figure has no alternative text, an X-ray's table is cut off, or a
request leaves the machine. With a folder it writes a picture of each page there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, Request, sync_playwright

PAGES = {
    "kernels/04_fa2_fp32.cu": ".jp-FileEditor .cm-line span",
    "notebooks/00_start_here.ipynb": ".jp-OutputArea-output img",
}


def wrong(page: Page, path: str) -> list[str]:
    """What a reader of this page would miss."""
    if path.endswith(".cu"):
        colours = page.evaluate(
            "() => new Set([...document.querySelectorAll('.cm-line span')].map(s => getComputedStyle(s).color)).size"
        )
        return [] if colours >= 4 else [f"{path}: {colours} colours of code"]
    silent = page.evaluate(
        "() => [...document.querySelectorAll('.jp-OutputArea-output img')].filter(i => !i.alt).length"
    )
    cut = page.evaluate(
        "() => [...document.querySelectorAll('.jp-OutputArea table')].filter(t => t.scrollWidth > t.parentElement.clientWidth + 1).length"
    )
    found = [f"{path}: {silent} figures without alternative text"] if silent else []
    return found + ([f"{path}: {cut} tables wider than the page"] if cut else [])


def main(address: str, pictures: str = "") -> int:
    found: list[str] = []

    def outside(request: Request) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            found.append(f"asks {request.url}")

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for width in (1024, 1440):
            for path, ready in PAGES.items():
                page = browser.new_page(viewport={"width": width, "height": 900})
                page.on("request", outside)
                page.goto(f"{address}/lab/tree/{path}?reset")
                page.wait_for_selector(ready, timeout=60_000)
                page.wait_for_timeout(2000)
                found += [f"{width} px, {words}" for words in wrong(page, path)]
                if pictures:
                    page.screenshot(path=str(Path(pictures) / f"{Path(path).stem}-{width}.png"))
                page.close()
        browser.close()
    print(*(found or ["as it should be"]), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

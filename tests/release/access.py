"""axe-core on pages as Chromium shows them, light and dark: WCAG 2.1 A and AA.

    python tests/release/access.py build/book/html/notebooks/*.html build/slides/*.html

Needs playwright, axe-playwright-python (which has axe-core) and Chromium (Debian: apt install chromium). Of slides it looks at each,
stepping with the arrow key. Exits with 1 if it finds something.
"""

from __future__ import annotations

import sys
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}


def violations(page: Page) -> dict[str, str]:
    """Rules that are broken, with the first element that breaks each."""
    return {v["id"]: v["nodes"][0]["html"][:120] for v in Axe().run(page, options=RULES).response["violations"]}


def main(paths: list[str]) -> int:
    wrong = 0
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for path in paths:
            for theme in ("light", "dark"):
                page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=theme)
                page.goto(Path(path).resolve().as_uri())
                page.wait_for_timeout(3000)
                found = violations(page)
                for _ in range(page.evaluate("typeof Reveal == 'undefined' ? 0 : Reveal.getTotalSlides() - 1")):
                    page.keyboard.press("ArrowRight")
                    page.wait_for_timeout(400)
                    found |= violations(page)
                page.close()
                wrong += len(found)
                print(
                    *[f"{path} ({theme}): {rule}: {html}" for rule, html in found.items()] or [f"{path} ({theme})"],
                    sep="\n",
                )
        browser.close()
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

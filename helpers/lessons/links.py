"""The line of links under a notebook's title: the lesson before it, its kernel, the glossary, the lesson after it.

`python -m helpers notebooks --from-text` writes it, and a test holds it.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..ladder.paths import NOTEBOOKS

TITLE = re.compile(r"^# # (?P<title>\d\d · .+)\n", re.MULTILINE)
LINE = re.compile(r"#\n# .*\[glossary\]\(glossary\.md\).*\n")


def line(stem: str, folder: Path = NOTEBOOKS) -> str:
    """The links of one notebook, in Markdown. A log stands beside the lessons: its neighbours are those of its number."""
    others = sorted(path.stem for path in (folder / "src").glob("[0-9][0-9]_*.py") if not path.stem.endswith("_log"))
    before, after = [s for s in others if s < stem], [s for s in others if s > stem]
    parts = [f"[← {_title(before[-1], folder)}]({before[-1]}.ipynb)"] if before else []
    if (folder.parent / "kernels" / f"{stem}.cu").exists():
        parts.append(f"[{stem}.cu](../kernels/{stem}.cu)")
    parts.append("[glossary](glossary.md)")
    parts += [f"[{_title(after[0], folder)} →]({after[0]}.ipynb)"] if after else []
    return " | ".join(parts)


def _title(stem: str, folder: Path) -> str:
    title = TITLE.search((folder / "src" / f"{stem}.py").read_text())["title"]
    return title.split(":")[0]


def linked(text: str, stem: str, folder: Path = NOTEBOOKS) -> str:
    """The notebook's text with its line of links under the title, in place of an older one."""
    title = TITLE.search(text)
    if title is None:
        return text
    rest = LINE.sub("", text[title.end() :], count=1) if LINE.match(text, title.end()) else text[title.end() :]
    return f"{text[: title.end()]}#\n# {line(stem, folder)}\n{rest}"

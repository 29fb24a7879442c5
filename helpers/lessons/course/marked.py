"""Texts of the course with parts for instructors alone, between `<!-- instructor -->` and `<!-- /instructor -->`."""

from __future__ import annotations

import re

OPEN, CLOSE = "<!-- instructor -->", "<!-- /instructor -->"
_PART = re.compile(rf"[ \t]*{OPEN}\n?(.*?){CLOSE}[ \t]*\n?", re.DOTALL)


def for_students(text: str) -> str:
    """The text without the parts for instructors; nothing of a file that opens with such a part and has nothing else.

    ValueError if a marker has no partner: then an answer might be handed out.
    """
    _require_pairs(text)
    return re.sub(r"\n{3,}", "\n\n", _PART.sub("", text))


def for_instructors(text: str) -> str:
    """All of the text, without the markers."""
    _require_pairs(text)
    return _PART.sub(r"\1", text)


def _require_pairs(text: str) -> None:
    order = re.findall(rf"{OPEN}|{CLOSE}", text)
    if order != [OPEN, CLOSE] * (len(order) // 2):
        raise ValueError("markers of parts for instructors don't pair")

"""notebooks/glossary.md: in alphabetical order, its links lead to notebooks, and each term stands in the notebooks."""

from __future__ import annotations

import re

import pytest

from helpers.lessons import execute

PAGE = execute.NOTEBOOKS / "glossary.md"
LINK = re.compile(r"\[(\d\d)\]\(([^)]+)\)")
ALSO = re.compile(r"\*also ([^*]+)\*")


def entries(text: str) -> dict[str, str]:
    """Term to what is said of it."""
    _, *parts = re.split(r"^### (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2]))


TERMS = entries(PAGE.read_text())
SERIES = " ".join(path.read_text() for path in (execute.NOTEBOOKS / "src").glob("*.py")).replace("\n# ", " ").lower()


def occurs(term: str, said: str, text: str) -> bool:
    """Whether the term, or another name that its entry gives ("*also GQA*"), begins a word of the text."""
    names = [*term.split(", "), *(name for names in ALSO.findall(said) for name in names.split(", "))]
    return any(re.search(rf"(?<!\w){re.escape(name.lower())}", text) for name in names)


def test_alphabetical_and_no_term_twice():
    keys = [term.lower() for term in TERMS]
    assert keys == sorted(keys) and len(set(keys)) == len(re.findall("^### ", PAGE.read_text(), re.MULTILINE)) > 60


@pytest.mark.parametrize("term", TERMS)
def test_a_term_leads_to_its_notebook_and_stands_in_the_series(term):
    links = LINK.findall(TERMS[term])
    assert links, "says no notebook"
    for number, target in links:
        assert target.startswith(number) and (execute.NOTEBOOKS / target).exists(), target
    assert occurs(term, TERMS[term], SERIES), f"no notebook speaks of {term}"
    assert len(TERMS[term].split(" *Elsewhere*")[0].split()) <= 45, "two sentences are enough"


def anchor(term: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", term.lower()).replace(" ", "-")


def test_links_to_terms_lead_to_one():
    anchors = {anchor(term) for term in TERMS}
    for path in (execute.NOTEBOOKS / "src").glob("*.py"):
        for asked in re.findall(r"glossary\.md#([^)\s]+)\)", path.read_text()):
            assert asked in anchors, f"{path.name}: #{asked}"
    assert {"br-bc", "bank-conflict", "cpasync", "mmasync", "x-ray"} <= anchors


def test_links_lead_to_terms_in_jupyterlab_too():
    """There a heading's anchor keeps its capitals and commas, so that such a term has GitHub's anchor besides."""
    for term in TERMS:
        own = f'<a id="{anchor(term)}"></a>\n\n### {term}\n'
        assert anchor(term) == term.replace(" ", "-") or own in PAGE.read_text(), f"write above ### {term}: {own}"


def test_a_term_that_stands_nowhere_is_seen():
    assert not occurs("hyperflux", "Also nothing.", SERIES)
    assert occurs("hyperflux", "A warp, *also warp*.", "a warp")
    assert not occurs("arp", "", "a warp")

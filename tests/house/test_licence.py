"""The licence and the citation say the same wherever they stand, and CITATION.cff is valid CFF 1.2.0."""

import re
import sys
from pathlib import Path

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
HOLDER = "the authors of flashattention-notebooks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
# CFF 1.2.0's schema: what a citation needs, and what else it may hold
NEEDED = {"cff-version", "message", "title", "authors"}
ALLOWED = NEEDED | {
    *("abstract", "commit", "contact", "date-released", "doi", "identifiers", "keywords", "license", "license-url"),
    *(
        "preferred-citation",
        "references",
        "repository",
        "repository-artifact",
        "repository-code",
        "type",
        "url",
        "version",
    ),
}
PERSON = {"family-names", "given-names", "name-particle", "name-suffix", "alias", "affiliation", "email", "orcid"}


def test_the_licence_is_mit_in_all_places():
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("MIT License\n") and re.search(rf"Copyright \(c\) \d{{4}} {HOLDER}\n", text)
    assert PROJECT["license"] == "MIT" and PROJECT["license-files"] == ["LICENSE"]
    assert CITATION["license"] == "MIT"
    readme = (ROOT / "README.md").read_text()
    assert "MIT" in readme and HOLDER in readme and "(LICENSE)" in readme and "(CITATION.cff)" in readme


def test_the_citation_is_valid():
    assert NEEDED <= CITATION.keys() <= ALLOWED
    assert CITATION["cff-version"] == "1.2.0" and CITATION["type"] in ("software", "dataset")
    assert CITATION["version"] == PROJECT["version"]  # read as a string, or 1.10 would become 1.1
    assert CITATION["authors"][0]["name"].lower() == HOLDER
    assert len(CITATION["keywords"]) == len(set(CITATION["keywords"]))
    for reference in CITATION["references"]:
        assert {"authors", "title", "type"} <= reference.keys()
        assert re.fullmatch(r"https://\S+", reference["url"]) and isinstance(reference["year"], int)
        for author in reference["authors"]:
            assert author.keys() <= PERSON and all(isinstance(value, str) for value in author.values())

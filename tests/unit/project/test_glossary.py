"""The glossary defines words of other pages or messages."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", GLOSSARY.read_text(), re.MULTILINE)[1:]
"""Term and meaning."""
TERMS = [re.sub(r" \(.+\)", "", term) for term, _ in ROWS]


@cache
def other_pages() -> str:
    """Return the text of all other pages, in lower case and on one line."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page != GLOSSARY]
    return " ".join(" ".join(page.read_text() for page in [ROOT / "README.md", *pages]).lower().split())


def test_the_glossary_is_read() -> None:
    assert len(TERMS) >= 45


@pytest.mark.parametrize("term", TERMS)
def test_a_term_occurs_on_another_page(term: str) -> None:
    assert re.search(rf"\b{re.escape(term.lower())}", other_pages()), term


def test_terms_are_sorted_and_defined_once() -> None:
    assert len(set(TERMS)) == len(TERMS)
    assert [term.lower() for term in TERMS] == sorted(term.lower() for term in TERMS)


@pytest.mark.parametrize(("term", "meaning"), ROWS)
def test_a_meaning_is_a_sentence(term: str, meaning: str) -> None:
    assert len(meaning.split()) >= 4
    assert meaning.endswith("."), term

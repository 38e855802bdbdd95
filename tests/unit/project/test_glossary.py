"""The glossary's words are where it says that they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "primeslurm"
ROWS = re.findall(r"^\| (.+?) \| .+ \| (`.+) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
"""Word, and where it lives."""


def rooms(places: str) -> list[Path]:
    """Directories and modules: of `` `a`, `b` `` these two, of `` `x` in `a`, `b` `` what is called x in them."""
    inside, _, outside = places.rpartition(" in ")
    return [
        PACKAGE / room / inside.strip("`") if inside else PACKAGE / room for room in re.findall(r"`(.+?)`", outside)
    ]


def defined(room: Path) -> set[str]:
    """Names of modules below a room, and of classes and functions in them."""
    modules = sorted(room.rglob("*.py")) if room.is_dir() else [room.with_suffix(".py")]
    found = {module.stem for module in modules}
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
    return found


@pytest.mark.parametrize(("word", "places"), ROWS, ids=[word for word, _ in ROWS])
def test_words_live_where_the_glossary_says(word: str, places: str) -> None:
    found = rooms(places)
    assert [room for room in found if not room.exists() and not room.with_suffix(".py").exists()] == []
    names = set(re.findall(r"`(\w+)`", word))
    assert names <= set().union(*map(defined, found))


def test_the_glossary_is_read() -> None:
    assert len(ROWS) > 80

"""What `./just test` runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_directory_of_tests_is_run() -> None:
    words = set(re.findall(r"[\w/]+", (ROOT / "scripts" / "test.sh").read_text()))
    there = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert there - words == set()

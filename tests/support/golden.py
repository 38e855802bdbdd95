"""Compares outputs with files in tests/golden. PRIMESLURM_UPDATE_GOLDEN=1 rewrites the files."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def assert_golden(name: str, text: str) -> None:
    """Compare a text with a golden file, ignoring spaces at the ends of lines."""
    shown = "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
    path = GOLDEN / name
    if os.environ.get("PRIMESLURM_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown)
    assert shown == path.read_text()

"""Writes generated files of docs/ or, with --check, compares them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(texts: Mapping[Path, str]) -> None:
    """Write the files that are not current. With --check, write nothing and exit with 1 if there are any."""
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit(f"run `./just docs`: not current: {', '.join(path.name for path in stale)}" if stale else 0)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[path])

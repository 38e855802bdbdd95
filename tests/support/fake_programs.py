"""Fake programs, first on PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def put_on_path(monkeypatch: pytest.MonkeyPatch, directory: Path, text: str, *names: str) -> None:
    """Write an executable script under each name, into a directory that comes first on PATH."""
    for name in names:
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

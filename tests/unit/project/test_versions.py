"""The version is the same everywhere."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

from primeslurm import __version__
from tests.support.cli import primeslurm

ROOT = Path(__file__).resolve().parents[3]


def test_every_file_names_the_version_of_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    newest = re.search(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest.groups() == (__version__, str(citation["date-released"]))


def test_the_version_names_the_commit_of_a_checkout(tmp_path: Path) -> None:
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = f" ({head.stdout[:12]}" if head.returncode == 0 else ""
    shown = primeslurm("--version", cwd=tmp_path)
    assert shown.code == 0 and shown.out.startswith(f"primeslurm {__version__}{commit}"), shown

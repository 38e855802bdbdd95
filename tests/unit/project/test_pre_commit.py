"""The pre-commit hooks pass on the whole tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / ".pre-commit-config.yaml"
PROGRAMS = Path(sys.executable).parent
LINT = {
    "ruff-check": "ruff check",
    "ruff-format": "ruff format",
    "mypy": "mypy",
    "lint-imports": "lint-imports",
    "deptry": "deptry",
    "shellcheck": "shellcheck",
    "hadolint": "hadolint",
    "docs": "docs-site",
}
"""Hooks that `./just lint` also runs, and which need not run twice."""


def _is_checkout() -> bool:
    """Return whether git can read this tree, which may be unpacked or belong to another user."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel"]
    return shutil.which("git") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_skipped_hooks_run_in_lint() -> None:
    hooks = set(re.findall(r"\{id: ([\w-]+)", CONFIG.read_text()))
    recipe = re.search(r"^lint:.*\n((    .*\n)+)", (ROOT / "Justfile").read_text(), re.MULTILINE)
    assert recipe is not None and hooks > LINT.keys() and len(hooks) > len(LINT) + 5
    assert [name for name, command in LINT.items() if command not in recipe[0]] == []


@pytest.mark.skipif(not _is_checkout(), reason="needs git, and a checkout that it may read")
def test_all_other_hooks_pass_on_all_files(tmp_path: Path) -> None:
    env = {**os.environ, "SKIP": ",".join(LINT), "PRE_COMMIT_HOME": str(tmp_path)}
    argv = [str(PROGRAMS / "pre-commit"), "run", "--all-files", "--color", "never"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Passed") >= 7

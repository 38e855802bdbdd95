"""Temporary files of killed tests and benchmarks are removed."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import ROOT
from tests.support.waiting import wait_until

TESTS = """
import os, signal, tempfile
from tests.support.temporary import use_own
held = use_own()
print(tempfile.mkdtemp(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
BENCHMARK = """
import os, signal, tempfile, types
from benchmarks import __main__ as command
def killed(words):
    print(tempfile.mkdtemp(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
command.importlib.import_module = lambda name: types.SimpleNamespace(main=killed)
command.main(["turns"])
"""


@pytest.mark.parametrize("code", [TESTS, BENCHMARK], ids=["tests", "benchmark"])
def test_temporary_directory_is_removed_after_a_kill(code: str) -> None:
    argv = [sys.executable, "-c", code]
    killed = Path(subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout.strip())
    assert killed.parent.parent == Path(tempfile.gettempdir()) and killed.parent.name.startswith("ps")
    wait_until(lambda: not killed.parent.exists())


def test_tests_leave_nothing_in_the_shared_temporary_directory() -> None:
    assert Path(tempfile.gettempdir()).name.startswith("ps")


def made_elsewhere(path: Path) -> Iterator[str]:
    """Return the calls by which a file makes temporary files in a directory that it names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("tempfile."):
            named = [word.value for word in node.keywords if word.arg == "dir"]
            if any(isinstance(value, ast.Constant) for value in named):
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_test_uses_the_shared_temporary_directory() -> None:
    assert [place for path in sorted(Path(ROOT, "tests").rglob("*.py")) for place in made_elsewhere(path)] == []

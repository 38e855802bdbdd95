"""What tests leave in their temporary directory when they are killed is removed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.cli import ROOT

KILLED = """
import os, signal, tempfile
from tests.support.temporary import use_own
held = use_own()
print(tempfile.mkdtemp(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
PATIENCE_S = 60.0


def test_tests_have_a_temporary_directory_of_their_own_that_goes_when_they_are_killed() -> None:
    argv = [sys.executable, "-c", KILLED]
    killed = Path(subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout.strip())
    assert killed.parent.parent == Path(tempfile.gettempdir()) and killed.parent.name.startswith("ps")
    deadline = time.monotonic() + PATIENCE_S
    while killed.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not killed.parent.exists()


def test_tests_keep_nothing_in_the_directory_of_all() -> None:
    assert Path(tempfile.gettempdir()).name.startswith("ps")

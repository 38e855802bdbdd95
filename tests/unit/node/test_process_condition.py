"""Conditions that keep a process and its children from running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from primeslurm.node.agent.liveness_monitor import condition_of
from tests.support.waiting import wait_until

PARENT = """
import subprocess, sys
own = subprocess.Popen(["sleep", "600"])
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(own.pid, apart.pid, flush=True)
sys.stdin.read()
own.kill(); apart.kill()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int, int]]:
    """Return a process, a child in its group, and one in another session, like the programs of a sandbox."""
    argv = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True)
    assert parent.stdout is not None
    own, apart = map(int, parent.stdout.readline().split())
    yield parent.pid, own, apart
    for pid in (own, apart):
        os.kill(pid, signal.SIGCONT)
    parent.communicate()


def test_a_stopped_child_stops_its_parent(family: tuple[int, int, int]) -> None:
    parent, own, _ = family
    assert not condition_of(parent).stopped
    os.kill(own, signal.SIGSTOP)
    wait_until(lambda: condition_of(parent).stopped)
    os.killpg(parent, signal.SIGCONT)
    wait_until(lambda: not condition_of(parent).stopped)


def test_a_child_in_another_session_does_not_count(family: tuple[int, int, int]) -> None:
    parent, _, apart = family
    os.kill(apart, signal.SIGSTOP)
    wait_until(lambda: condition_of(apart).stopped)
    assert not condition_of(parent).stopped


def test_a_process_that_has_ended_has_no_condition(family: tuple[int, int, int]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert condition_of(gone.pid) == (False, False, 0.0)

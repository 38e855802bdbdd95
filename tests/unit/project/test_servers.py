"""Servers of tests and benchmarks are ended together with their child processes, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.support.servers import Server
from primeslurm.testbed.embedded_slurm.daemons import OsProcess
from tests.support.cli import ROOT
from tests.support.waiting import wait_until

PORTS = "from benchmarks.support.ports import free_port; print(*(free_port() for _ in range(60)), flush=True); input()"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
LEAVES_ONE = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True)"


def gone(pid: int) -> bool:
    """Return whether a process has ended. It may remain a zombie."""
    return OsProcess.of("", pid) is None


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP, start_new_session=True) as started:
        yield started
        started.kill()


def test_a_server_is_ended(process: subprocess.Popen[bytes]) -> None:
    server = Server(process.pid, "", Path())
    assert server.alive()
    server.kill()
    assert not server.alive()
    wait_until(lambda: gone(process.pid))


def test_later_process_with_the_same_pid_is_not_killed(process: subprocess.Popen[bytes]) -> None:
    server = Server(process.pid, "", Path())
    assert server.started is not None
    server.started -= 1  # as if the original process had ended
    assert not server.alive()
    server.kill()
    server.stop()
    assert process.poll() is None


def test_child_processes_of_a_server_are_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEAVES_ONE, *SLEEP], stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        server = Server(process.pid, "", Path())
        assert process.stdout is not None
        left = int(process.stdout.readline())
        wait_until(lambda: not server.alive())
        assert psutil.pid_exists(left)
        server.kill()
        wait_until(lambda: gone(left))


def test_processes_at_the_same_time_get_different_ports() -> None:
    argv = [sys.executable, "-c", PORTS]
    processes = [subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    ports = [port for process in processes for port in process.stdout.readline().split()]  # type: ignore[union-attr]
    for process in processes:
        process.communicate(b"\n")
    assert len(set(ports)) == len(ports) == 180

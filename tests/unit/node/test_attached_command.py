"""Commands with the environment of a process, or of its agent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SLEEP = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[list[int]]:
    """Return a process, its agent, and a process that has ended."""
    (tmp_path / "work").mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    started = []
    for env, cwd in (({"WHO": "process"}, tmp_path / "work"), ({"WHO": "agent", "PATH": "/usr/bin:/bin"}, tmp_path)):
        process = subprocess.Popen(SLEEP, env=env, cwd=cwd, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()  # after exec it has its own environment
        started.append(process)
    yield [*(process.pid for process in started), ended.pid]
    for process in started:
        process.kill()
        process.communicate()


def run_as(pid: int, agent: int, *command: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "primeslurm.node.host.attached_command", str(pid), str(agent), *command]
    return subprocess.run(argv, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)


def test_the_environment_of_the_process_overrides_that_of_its_agent(pids: list[int], tmp_path: Path) -> None:
    process, agent, ended = pids
    done = run_as(process, agent, "sh", "-c", "echo $WHO $PATH $PWD; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, f"process /usr/bin:/bin {tmp_path}/work\n", "")
    done = run_as(ended, agent, "sh", "-c", "echo $WHO $PWD")
    assert done.stdout == f"agent {tmp_path}\n" and "does not run" in done.stderr


def test_exit_codes_without_agent_or_command(pids: list[int]) -> None:
    process, agent, ended = pids
    done = run_as(process, ended, "true")
    assert done.returncode == 126 and "does not run on this node" in done.stderr
    done = run_as(process, agent, "no-such-command")
    assert (done.returncode, done.stderr) == (127, "no-such-command: No such file or directory\n")

"""Directories of a killed agent are removed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from primeslurm.node.host.exit_cleanup import ExitCleanup

_OWNER = """
import sys, time
from pathlib import Path
from primeslurm.node.host.exit_cleanup import ExitCleanup
cleanup = ExitCleanup()
cleanup.add(Path(sys.argv[1]))
cleanup.add(Path(sys.argv[2]))
print(cleanup.pid, flush=True)
time.sleep(600)
"""


def settled(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def gone(*paths: Path) -> bool:
    return settled(lambda: not any(path.exists() for path in paths))


def ignores(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn")]
    return bool(mask >> (number - 1) & 1)


def test_only_directories_of_the_killed_process_are_removed(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("it is 'mine'", "$(touch evil) *", "another's"))
    for path in (first, second, other):
        (path / "below").mkdir(parents=True)
    argv = [sys.executable, "-c", _OWNER, str(first), str(second)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        cleanup = int(owner.stdout.readline())
        # Slurm signals every process of a step. This one must outlive the others.
        assert settled(lambda: ignores(cleanup, signal.SIGTERM))
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
            subprocess.run(["kill", f"-{number.value}", str(cleanup)], check=True)
        assert first.exists() and second.exists()
        owner.kill()
    assert gone(first, second)
    assert (other / "below").exists()
    assert gone(Path(f"/proc/{cleanup}"))


def test_the_shell_ends_when_nothing_is_left(tmp_path: Path) -> None:
    cleanup = ExitCleanup()
    cleanup.add(tmp_path / "gone already")
    cleanup.close()
    assert not Path(f"/proc/{cleanup.pid}").exists()

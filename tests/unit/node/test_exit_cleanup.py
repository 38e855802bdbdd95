"""Directories of a killed agent are removed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from primeslurm.node.host.exit_cleanup import ExitCleanup
from tests.support.waiting import wait_until

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
        wait_until(lambda: ignores(cleanup, signal.SIGTERM))
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
            subprocess.run(["kill", f"-{number.value}", str(cleanup)], check=True)
        assert first.exists() and second.exists()
        owner.kill()
    wait_until(lambda: not (first.exists() or second.exists()))
    assert (other / "below").exists()
    wait_until(lambda: not Path(f"/proc/{cleanup}").exists())


def test_the_shell_ends_when_nothing_is_left(tmp_path: Path) -> None:
    cleanup = ExitCleanup()
    cleanup.add(tmp_path / "gone already")
    cleanup.close()
    assert not Path(f"/proc/{cleanup.pid}").exists()

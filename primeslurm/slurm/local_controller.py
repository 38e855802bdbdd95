"""Keeps a local run's agents: `python -m primeslurm.slurm.local_controller FOLDER MAX_ATTEMPTS`.

submitit's own controller starts a job at most six times and leaves its tasks one second to end. An agent ends the
processes of a whole node, so it gets as long as Slurm would give it.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from submitit.local.local import Controller

KILL_WAIT_S = 30.0


class PatientController(Controller):  # type: ignore[misc]  # submitit is not followed by mypy
    """submitit's local controller, with Slurm's patience at the end of tasks."""

    def kill_tasks(self) -> None:
        """End the tasks that still run: SIGTERM, up to KILL_WAIT_S, then SIGKILL; close their logs."""
        self._forward_signal(signal.SIGTERM)
        deadline = time.monotonic() + KILL_WAIT_S
        while any(task.poll() is None for task in self.tasks) and time.monotonic() < deadline:
            time.sleep(0.1)
        super().kill_tasks()


if __name__ == "__main__":
    PatientController(Path(sys.argv[1])).run(max_retry=int(sys.argv[2]))

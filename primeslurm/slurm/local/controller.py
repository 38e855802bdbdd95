"""Control a local run's agents: `python -m primeslurm.slurm.local.controller FOLDER MOST_STARTS SUBMISSION`.

submitit's own controller starts a job at most six times, waits for every task even if one asked for a requeue, and
gives tasks one second to end. An agent ends the processes of a whole node, so this one treats agents as Slurm does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, Controller, LocalJobEnvironment

from primeslurm.slurm.client import KILL_WAIT_S
from primeslurm.slurm.launch_failures import START

_POLL_S = 0.1


class PlanController(Controller):
    """submitit's local controller with Slurm's behaviour at the end of an attempt. SIGTERM to it ends the run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def start_tasks(self) -> None:
        """Start the tasks with a new `START` word, as the batch script of a Slurm job does."""
        os.environ[START] = str(uuid.uuid4())
        super().start_tasks()

    def wait(self, freq: int = 24) -> Sequence[int | None]:
        """Return the exit codes once all tasks ended, one asked for a requeue, the time is over, or the run is to end.

        Tasks get USR2 `signal_delay_s` before the time is over. Inside a Slurm allocation the time also ends with the
        allocation, and no attempt follows one that ends then.
        """
        deadline = time.monotonic() + min(self.timeout_s, _allocation_left_s())
        warned = False
        while True:
            codes = [task.poll() for task in self.tasks]
            now = time.monotonic()
            if None not in codes or LOCAL_REQUEUE_RETURN_CODE in codes or self._stopping or now > deadline:
                last = _allocation_left_s() <= self.signal_delay_s
                return [None if last and code == LOCAL_REQUEUE_RETURN_CODE else code for code in codes]
            if not warned and now > deadline - self.signal_delay_s:
                self._forward_signal(LocalJobEnvironment._usr_sig())
                warned = True
            time.sleep(_POLL_S)

    def kill_tasks(self) -> None:
        """End running tasks with SIGTERM, and with SIGKILL after KILL_WAIT_S. Close their logs."""
        self._forward_signal(signal.SIGTERM)
        deadline = time.monotonic() + KILL_WAIT_S
        while any(task.poll() is None for task in self.tasks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        super().kill_tasks()


def _allocation_left_s() -> float:
    """Return the seconds until this process's Slurm allocation ends."""
    return float(os.environ.get("SLURM_JOB_END_TIME", "inf")) - time.time()


if __name__ == "__main__":
    PlanController(Path(sys.argv[1])).run(max_retry=int(sys.argv[2]))

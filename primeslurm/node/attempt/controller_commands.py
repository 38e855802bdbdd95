"""Commands for Slurm's controller that must succeed even if it is down for a while: nothing else restarts a run.

Slurm's own commands give up after half a minute. An upgrade of the controller takes minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from primeslurm.base.errors import ClusterError
from primeslurm.slurm.client import SlurmClient

T = TypeVar("T")
DOWN_S = 3600.0  # longest wait for a controller that does not answer
MAX_REFUSALS = 5  # a controller that has just started may refuse a command that it accepts a moment later
POLL_S = 2.0
SAVED_S = 7.0  # after this long a change is on the controller's disk, because it saves changes within five seconds


def insist(client: SlurmClient, command: Callable[[], T]) -> T:
    """Call `command` once the controller answers, and repeat it while the controller fails.

    Raises:
        ClusterError: the controller refuses, or is down for `DOWN_S`.
    """
    refusals, deadline, announced = 0, time.monotonic() + DOWN_S, False
    while True:
        if client.ping():
            try:
                return command()
            except ClusterError:
                refusals += 1
                if refusals == MAX_REFUSALS:
                    raise
        elif time.monotonic() > deadline:
            raise ClusterError(f"Slurm's controller has not answered for {DOWN_S / 60:.0f} minutes")
        elif not announced:
            announced = True
            print("primeslurm: Slurm's controller does not answer; waiting for it", file=sys.stderr, flush=True)
        time.sleep(POLL_S)


def requeue(client: SlurmClient, job_id: str, restarts: int) -> None:
    """Requeue a job that is still running, and watch for SAVED_S that the controller does not forget it.

    A controller that is killed before it saved the requeue restarts with a job in state RUNNING whose processes have
    all ended, and notices only minutes later. Such a job is requeued again, and watched for another SAVED_S. This wait
    costs nothing: the job cannot start before the credentials of its last start have expired (`cred_expire`, 120 s by
    default). `restarts` is the number of requeues at the start of the attempt.

    Raises:
        ClusterError: as for `insist`.
    """

    def once() -> bool:
        job = client.job(job_id)
        needed = job is not None and job.state == "RUNNING" and job.restarts <= restarts
        if needed:
            client.requeue(job_id)
        return needed

    deadline = time.monotonic() + SAVED_S
    while True:
        if insist(client, once):
            deadline = time.monotonic() + SAVED_S
        elif time.monotonic() >= deadline:
            return
        time.sleep(POLL_S)

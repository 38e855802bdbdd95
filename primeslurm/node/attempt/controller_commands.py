"""Commands that Slurm's controller must get although it may be away for long: nobody else starts a run again.

Slurm's own give up after half a minute without it, an upgrade of it takes minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from primeslurm.base.errors import ClusterError
from primeslurm.slurm.client import SlurmClient

T = TypeVar("T")
AWAY_S = 3600.0
"""For so long a controller that does not answer is waited for."""
REFUSALS = 5
"""A controller that has just started may refuse what it takes a moment later."""
LOOK_AGAIN_S = 2.0
SAVED_S = 7.0
"""After which a controller has a change on its disk: it writes what has changed within five seconds."""


def insist(client: SlurmClient, command: Callable[[], T]) -> T:
    """Call `command` when the controller is there, and again while it was not.

    Raises:
        ClusterError: the controller refuses, or is away for `AWAY_S`.
    """
    refused, until, told = 0, time.monotonic() + AWAY_S, False
    while True:
        if client.ping():
            try:
                return command()
            except ClusterError:
                refused += 1
                if refused == REFUSALS:
                    raise
        elif time.monotonic() > until:
            raise ClusterError(f"Slurm's controller has been away for {AWAY_S / 60:.0f} minutes")
        elif not told:
            told = True
            print("primeslurm: Slurm's controller is away; waiting for it", file=sys.stderr, flush=True)
        time.sleep(LOOK_AGAIN_S)


def requeue(client: SlurmClient, job_id: str, restarts: int) -> None:
    """Put a job back into the queue, unless somebody has done so or has ended it, and stay until that is on disk.

    A controller that is killed before comes back with a job that runs, whose processes have all ended: it would find
    out minutes later. While the caller stays, the job does not start again; nor could it sooner, as Slurm waits for the
    credentials of its last start to expire (`cred_expire`, 120 s by default).

    Args:
        client: of the cluster.
        job_id: the leader's.
        restarts: how often Slurm had requeued the job when the attempt began.

    Raises:
        ClusterError: as `insist`.
    """

    def once() -> bool:
        """Whether there was a need to."""
        job = client.job(job_id)
        needed = job is not None and job.state == "RUNNING" and job.restarts <= restarts
        if needed:
            client.requeue(job_id)
        return needed

    until = time.monotonic() + SAVED_S
    while True:
        if insist(client, once):
            until = time.monotonic() + SAVED_S
        elif time.monotonic() >= until:
            return
        time.sleep(LOOK_AGAIN_S)

"""The job of a run: asking whoever runs it (Slurm, or the process table) for its state, and ending it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from primeslurm.errors import ClusterError, RunError
from primeslurm.plan.model import Plan
from primeslurm.records.attempt import JobRecord
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.run_status import JobQuery
from primeslurm.slurm.client import SlurmClient

OnSilence = Callable[[ClusterError], None]
"""Told that Slurm gave no answer."""


def job_query(run: RunDirectory, if_silent: OnSilence | None = None) -> JobQuery:
    """Make what asks for the state of a job of this run.

    Args:
        run: whose job is asked for.
        if_silent: called where Slurm gives no answer, which is then taken for a job that Slurm does not know. Without
            it, the query raises ClusterError.
    """

    def ask(job: JobRecord) -> str | None:
        try:
            return _state(run, job)
        except ClusterError as error:
            if if_silent is None:
                raise
            if_silent(error)
            return None

    return ask


def end_job(plan: Plan, job: JobRecord) -> None:
    """End a job that may have ended by itself. Raises ClusterError."""
    if job.executor == "slurm":
        client = SlurmClient(job.slurm_conf)
        state = client.job(job.job_id)
        if state is not None and state.active:
            client.cancel(job.job_id)
        return
    from primeslurm.slurm.local import submit

    with contextlib.suppress(RunError):  # it has ended by itself
        submit.cancel(plan, job.job_id)


def _state(run: RunDirectory, job: JobRecord) -> str | None:
    if job.executor == "local":
        from primeslurm.slurm.local import submit

        return "RUNNING" if submit.is_running(run.latest().plan(), job.job_id) else None
    if job.slurm_conf is not None and not Path(job.slurm_conf).is_file():
        return None  # an embedded cluster that is down has no jobs
    state = SlurmClient(job.slurm_conf).job(job.job_id)
    if state is None:
        return None
    return f"{state.state} ({state.reason})" if state.reason and state.state == "PENDING" else state.state

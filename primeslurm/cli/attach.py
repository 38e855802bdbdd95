"""The verb that goes where a process runs: attach."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from primeslurm.cli.output import note
from primeslurm.cli.runs import RunArg, RunsOpt, find_run, reading
from primeslurm.errors import RunError
from primeslurm.plan.model import Plan
from primeslurm.records.attempt import JobRecord
from primeslurm.run.placement import placement_of
from primeslurm.run.target import Target, find_target
from primeslurm.slurm import local
from primeslurm.slurm.attach import step_command
from primeslurm.slurm.client import SlurmClient


def attach(
    run: RunArg,
    target: Annotated[str, typer.Argument(help="Role, process or node, for example decode-r0-3.", show_default=False)],
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: run this instead of a shell.", show_default=False)
    ] = None,
    runs: RunsOpt = None,
) -> None:
    """Open a shell where a process runs, in the job's allocation, with that process's environment and directory.

    Ends with the exit code of the shell or command.
    """
    directory = find_run(run, runs)
    attempt = directory.latest()
    job, plan = attempt.job(), attempt.plan()
    if job is None or attempt.end() is not None:
        raise RunError(f"{directory.name} does not run")
    with reading(directory):
        place = find_target(placement_of(attempt), attempt, target)
    wanted = command or [os.environ.get("SHELL", "/bin/bash")]
    note(f"{place.process or 'agent'} on {place.host}")
    inside = [*plan.job.launcher, plan.python, "-m", "primeslurm.node.inside", *_pids(place), *wanted]
    argv = _argv(plan, job, place, inside)
    environment = {**os.environ, **({"SLURM_CONF": job.slurm_conf} if job.slurm_conf else {})}
    sys.stdout.flush()
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        raise RunError(f"{argv[0]}: {error.strerror}") from None


def _argv(plan: Plan, job: JobRecord, place: Target, inside: list[str]) -> list[str]:
    if job.executor == "local":
        if not local.is_running(plan, job.job_id):
            raise RunError(f"{plan.run} does not run")
        return inside
    state = SlurmClient(job.slurm_conf).job(job.job_id)
    if state is None:
        raise RunError(f"Slurm does not know job {job.job_id}")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return step_command(state, place.group, place.host, inside, more=plan.job.srun, terminal=terminal)


def _pids(place: Target) -> list[str]:
    """The process's, or again the agent's where there is none."""
    agent = place.report.agent_pid
    own = place.report.processes.get(place.process or "")
    return [str((own.pid if own else None) or agent), str(agent)]

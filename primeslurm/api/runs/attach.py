"""Build the command that opens a shell next to a process of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from primeslurm.api.runs.run import Run, reading
from primeslurm.base.errors import RunError
from primeslurm.plan.model import Plan
from primeslurm.records.attempt import JobRecord
from primeslurm.run.status.plan_outline import read_outline
from primeslurm.run.status.target import ProcessTarget, find_target
from primeslurm.slurm.attach import step_command
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.environment import clean
from primeslurm.slurm.local import submit


@dataclass(frozen=True)
class Attachment:
    """A command, and the process and host on which it runs."""

    argv: list[str]
    environment: Mapping[str, str]
    process: str | None
    """None if the target is a node."""
    host: str


def attachment(run: Run, word: str, command: Sequence[str], *, terminal: bool) -> Attachment:
    """Return a command that runs `command` in the allocation and environment of a role, process or node.

    Raises UsageError if the run has nothing named `word`, and RunError if the run, or its part on that node, is not
    running.
    """
    attempt = run.directory.latest()
    job, plan = attempt.job(), attempt.plan()
    if job is None or attempt.end() is not None:
        raise RunError(f"{run.name} does not run")
    with reading(run):
        target = find_target(read_outline(attempt), attempt, word)
    inside = [*plan.job.launcher, plan.python, "-m", "primeslurm.node.host.exec_in_process", *_pids(target), *command]
    argv = _argv(plan, job, target, inside, terminal)
    return Attachment(argv, clean(os.environ, job.slurm_conf), target.process, target.host)


def _argv(plan: Plan, job: JobRecord, target: ProcessTarget, inside: list[str], terminal: bool) -> list[str]:
    if job.executor == "local":
        if not submit.is_running(plan, job.job_id):
            raise RunError(f"{plan.run} does not run")
        return inside
    state = SlurmClient(job.slurm_conf).job(job.job_id)
    if state is None:
        raise RunError(f"Slurm does not know job {job.job_id}")
    return step_command(state, target.group, target.host, inside, more=plan.job.srun, terminal=terminal)


def _pids(target: ProcessTarget) -> list[str]:
    # exec_in_process takes the environment from the first process. Without one, it takes the agent's.
    agent = target.report.agent_pid
    process = target.report.processes.get(target.process or "")
    return [str((process.pid if process else None) or agent), str(agent)]

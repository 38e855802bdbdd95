"""The command that opens a shell next to a process of a run."""

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
from primeslurm.slurm.client import JobState, SlurmClient
from primeslurm.slurm.environment import clean
from primeslurm.slurm.local import submit


@dataclass(frozen=True)
class Attachment:
    """A command to execute, and the process and host that it reaches."""

    argv: list[str]
    environment: Mapping[str, str]
    process: str | None
    """None if the target is a node."""
    host: str


def attachment(run: Run, word: str, command: Sequence[str], *, terminal: bool) -> Attachment:
    """Return the command that runs `command` next to a process, in the job's allocation and environment.

    Args:
        run: the run.
        word: a role, process or node.
        command: program and arguments.
        terminal: allocate a terminal for the command.

    Raises:
        UsageError: the run has no role, process or node of that name.
        RunError: the run, or its part on that node, is not running.
        ClusterError: Slurm does not answer.
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


def step_command(
    job: JobState, group: int, host: str, argv: Sequence[str], *, more: Sequence[str] = (), terminal: bool
) -> list[str]:
    """Return an `srun` command for a step that shares all resources with the other steps on `host`.

    Args:
        group: index of the plan's group that the host belongs to.
        more: additional srun options of the plan, for example a container's.
        terminal: whether the step gets a terminal, as a shell needs.

    Raises:
        RunError: the job does not run on this host.
    """
    het = len(job.components) > 1
    component = next((c for c in job.components if c.offset == (group if het else 0)), None)
    if component is None or component.state != "RUNNING":
        raise RunError(f"job {job.job_id} does not run: {component.state if component else job.state}")
    # srun wants the leader's id with the component's number: it refuses the component's own id.
    options = [f"--jobid={job.job_id}", *([f"--het-group={group}"] if het else [])]
    options += ["--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1", *more]
    return ["srun", *options, *(["--pty"] if terminal else []), *argv]


def _pids(target: ProcessTarget) -> list[str]:
    # exec_in_process takes the environment from the first process. Without one, it takes the agent's.
    agent = target.report.agent_pid
    process = target.report.processes.get(target.process or "")
    return [str((process.pid if process else None) or agent), str(agent)]

"""Build the command that opens a shell next to a process of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from primeslurm.api.runs.run import Run, reading
from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.records.attempt import JobRecord
from primeslurm.records.fleet import AgentReport
from primeslurm.run.directory import Attempt
from primeslurm.run.status.plan_outline import PlanOutline, read_outline
from primeslurm.slurm.client import JobState, SlurmClient
from primeslurm.slurm.environment import clean
from primeslurm.slurm.local import submit


@dataclass(frozen=True)
class Attachment:
    """A command, and the process and host on which it runs."""

    argv: list[str]
    environment: Mapping[str, str]
    process: str | None  # None if the target is a node
    host: str


@dataclass(frozen=True)
class Target:
    """A process or node of a running attempt, in which `attach` opens a shell or runs a command."""

    node: int  # index of the node in the plan
    group: int  # index of the node's component in a heterogeneous job
    process: str | None  # None if the target is the node itself
    report: AgentReport  # the last heartbeat of the node


def attachment(run: Run, name: str, command: Sequence[str], *, terminal: bool) -> Attachment:
    """Return a command that runs `command` in the allocation and environment of a role, process or node.

    Raises UsageError if the run has nothing of this name, and RunError if the run, or its part on that node, is not
    running.
    """
    attempt = run.directory.latest()
    job, plan = attempt.job(), attempt.plan()
    if job is None or attempt.end() is not None:
        raise RunError(f"{run.name} does not run")
    with reading(run):
        target = find_target(read_outline(attempt), attempt, name)
    # attached_command takes the environment from the first process. Without one, it takes the agent's.
    agent, process = target.report.agent_pid, target.report.processes.get(target.process or "")
    pids = [str((process.pid if process else None) or agent), str(agent)]
    argv = [*plan.job.launcher, plan.python, "-m", "primeslurm.node.host.attached_command", *pids, *command]
    argv = _in_allocation(plan, job, target, argv, terminal)
    return Attachment(argv, clean(os.environ, job.slurm_conf), target.process, target.report.name)


def find_target(outline: PlanOutline, attempt: Attempt, name: str) -> Target:
    """Return a process by name, the first process of a role, or a node by its name or index.

    Raises UsageError if the run has nothing of this name, and RunError if the node has not reported in this attempt.
    """
    processes = list(outline.processes())
    assignment = attempt.assignment()
    process = next((p for p in processes if name == p.name), None) or next(
        (p for p in processes if name == p.role), None
    )
    if process is not None:
        index = assignment.moved.get(process.name, process.node)
    elif name.isdigit() and int(name) < len(outline.nodes):
        index = int(name)
    else:
        reports = {node.index: attempt.heartbeat(node.index, assignment) for node in outline.nodes}
        hosts = {report.name: index for index, report in reports.items() if report is not None}
        if name not in hosts:
            valid = [*sorted({p.role for p in processes}), *(p.name for p in processes), *sorted(hosts)]
            why = "is not a role, process or node of this run"
            raise UsageError([Violation("TARGET", name, why, suggestion(name, valid))])
        index = hosts[name]
    report = attempt.heartbeat(index, assignment)
    if report is None:
        raise RunError(f"node {index} of {outline.run} has not reported in attempt {attempt.number}")
    return Target(index, outline.nodes[index].group, process.name if process else None, report)


def _in_allocation(plan: Plan, job: JobRecord, target: Target, argv: list[str], terminal: bool) -> list[str]:
    if job.executor == "local":
        if not submit.is_running(plan, job.job_id):
            raise RunError(f"{plan.run} does not run")
        return argv
    state = SlurmClient(job.slurm_conf).job(job.job_id)
    if state is None:
        raise RunError(f"Slurm does not know job {job.job_id}")
    return step_command(state, target.group, target.report.name, argv, more=plan.job.srun, terminal=terminal)


def step_command(
    job: JobState, group: int, host: str, argv: Sequence[str], *, more: Sequence[str] = (), terminal: bool
) -> list[str]:
    """Return an `srun` command for a step that shares all resources with the other steps on `host`.

    `group` is the host's group in the plan, and `more` has the plan's own srun options, for example of a container.
    Raises RunError if the job does not run on this host.
    """
    het = len(job.components) > 1
    component = next((c for c in job.components if c.offset == (group if het else 0)), None)
    if component is None or component.state != "RUNNING":
        raise RunError(f"job {job.job_id} does not run: {component.state if component else job.state}")
    # srun needs the leader's id with the component's number. It refuses the component's own id.
    options = [f"--jobid={job.job_id}", *([f"--het-group={group}"] if het else [])]
    options += ["--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1", *more]
    return ["srun", *options, *(["--pty"] if terminal else []), *argv]

"""Verbs that start work: submit and resume, and the dry run of a submission."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from primeslurm.api.bad_nodes import avoid_bad_nodes
from primeslurm.api.loading import LoadedRecipe
from primeslurm.api.runs import Run
from primeslurm.errors import ClusterError, PrimeslurmError, UsageError, Violation
from primeslurm.files import write_atomic
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import refuse
from primeslurm.records.attempt import JobRecord
from primeslurm.run.create import create, discard, missing_variables, name_in_use
from primeslurm.run.directory import Attempt
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.placement import placement_problems
from primeslurm.slurm.render import render


@dataclass(frozen=True)
class DryRun:
    """What a submission would do."""

    plan: Plan
    script: str
    """The batch script; empty for a run without Slurm."""
    unasked: tuple[str, ...] = ()
    """What could not be asked, and why."""


@dataclass(frozen=True)
class Submitted:
    """An attempt that was taken."""

    run: Run
    plan: Plan
    attempt: int
    job_id: str
    """The id of the Slurm job, or of the process that keeps a local run."""


def dry_run(loaded: LoadedRecipe) -> DryRun:
    """All that `submit` does before it writes anything. See `LoadedRecipe.dry_run`."""
    plan = loaded.plan()
    refuse(plan, "error")
    unasked: tuple[str, ...] = ()
    problems = name_in_use(Path(plan.run_dir)) + missing_variables(plan)
    if plan.executor == "slurm" and loaded.cluster is None:
        try:
            plan = avoid_bad_nodes(plan, loaded.site.slurm_conf)
            problems += _placement(plan, loaded.site.slurm_conf)
        except ClusterError as error:
            unasked = (f"placement not checked, because Slurm gives no answer: {error}",)
    if problems:
        raise UsageError(problems)
    return DryRun(plan, _script(plan), unasked)


def submit(loaded: LoadedRecipe) -> Submitted:
    """Make the run directory and submit the job; the cluster is up. See `LoadedRecipe.submit`."""
    plan = checked(loaded)
    if plan.executor == "slurm":
        plan = avoid_bad_nodes(plan, loaded.site.slurm_conf)
        if problems := _placement(plan, loaded.site.slurm_conf):
            raise UsageError(problems)
    script = _script(plan)
    attempt = create(loaded.files.located if loaded.files else loaded.recipe, plan, loaded.source)
    return _start(attempt, plan, script, loaded.site.slurm_conf)


def checked(loaded: LoadedRecipe) -> Plan:
    """The plan, if nothing that is known here speaks against it; Slurm is not asked. Raises UsageError."""
    plan = loaded.strict_plan()
    refuse(plan, "error", "blocked")
    if problems := name_in_use(Path(plan.run_dir)) + missing_variables(plan):
        raise UsageError(problems)
    return plan


def resume(run: Run) -> Submitted:
    """Submit a new attempt of a run that has ended. See `Run.resume`."""
    status = run.status()
    if status.active or status.phase == "completed":
        raise UsageError([Violation("RUN", run.name, f"is {status.phase}: there is nothing to resume")])
    previous = run.directory.latest()
    plan, job = previous.plan(), previous.job()
    if problems := missing_variables(plan):
        raise UsageError(problems)
    slurm_conf = job.slurm_conf if job else None
    if plan.executor == "slurm":
        plan = avoid_bad_nodes(plan, slurm_conf)
    script = _script(plan)
    attempt = run.directory.attempt(previous.number + 1)
    attempt.prepare(plan)
    return _start(attempt, plan, script, slurm_conf)


def _script(plan: Plan) -> str:
    return "" if plan.executor == "local" else render(plan)


def _placement(plan: Plan, slurm_conf: str | None) -> list[Violation]:
    return placement_problems(plan, SlurmClient(slurm_conf))


def _start(attempt: Attempt, plan: Plan, script: str, slurm_conf: str | None) -> Submitted:
    """Submit an attempt. One that is not taken leaves nothing."""
    from primeslurm.node.entry import AgentTask  # all of the agent, which only a job that starts needs

    task = AgentTask(plan.run_dir, attempt.number)
    try:
        if plan.executor == "local":
            from primeslurm.slurm.local import submit_local

            job_id = submit_local(plan, task)
        else:
            from primeslurm.slurm.executor import submit as submit_slurm

            path = attempt.path / "job.sbatch"
            write_atomic(path, script)
            job_id = submit_slurm(plan, task, path, slurm_conf)
    except (PrimeslurmError, OSError):
        discard(attempt)
        raise
    attempt.record_job(JobRecord(job_id, plan.executor, time.time(), slurm_conf))
    return Submitted(Run(Path(plan.run_dir)), plan, attempt.number, job_id)

"""Verbs that start work: submit and resume."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.cli.emulate import load_emulated, running
from primeslurm.cli.inspect import show_findings, show_plan
from primeslurm.cli.nodes import avoid_bad_nodes
from primeslurm.cli.options import JsonOpt, Loaded, LocalOpt, NameOpt, RecipeArg, SetOpt, SiteOpt, load, refuse
from primeslurm.cli.output import note, out, print_json
from primeslurm.cli.runs import RunArg, RunsOpt, find_run, status_of, strict_job_query
from primeslurm.cli.watch import watch_until_done
from primeslurm.errors import PrimeslurmError, UsageError, Violation
from primeslurm.files import write_atomic
from primeslurm.node.entry import AgentTask
from primeslurm.plan.model import Plan
from primeslurm.recipe import Site
from primeslurm.records.attempt import JobRecord
from primeslurm.run.create import create, discard, missing_variables, name_in_use
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.executor import submit as submit_slurm
from primeslurm.slurm.local import submit_local
from primeslurm.slurm.placement import placement_problems
from primeslurm.slurm.render import render

DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Show placement and script; write and submit nothing.")]
EmulateOpt = Annotated[
    bool,
    typer.Option("--emulate", help="Run the whole job with light stand-ins for engines, trainer and environments."),
]
WaitOpt = Annotated[bool, typer.Option("--wait", help="Show progress until the run has ended.")]


def submit(
    recipe: RecipeArg,
    site: SiteOpt = None,
    set_: SetOpt = None,
    name: NameOpt = None,
    local: LocalOpt = False,
    emulate: EmulateOpt = False,
    dry_run: DryRunOpt = False,
    wait: WaitOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Validate a recipe, place it, and submit it as one job."""
    if emulate:
        _submit_emulated(recipe, site, set_, name, local, dry_run, wait, as_json)
        return
    _submit(load(recipe, site, set_, name, local), recipe, dry_run, wait, as_json)


def _submit_emulated(
    recipe: Path, site: Path | None, set_: list[str] | None, name: str | None, local: bool, *options: bool
) -> None:
    if local:
        why = "an emulated run is a real Slurm job, on an embedded cluster"
        raise UsageError([Violation("--local", "", why, "leave it out")])
    dry_run, wait, as_json = options
    loaded, cluster = load_emulated(recipe, site, set_, name)
    if cluster is None or dry_run:
        _submit(loaded, recipe, dry_run, wait, as_json, placed=cluster is None)
        return
    if problems := name_in_use(Path(loaded.plan.run_dir)):
        raise UsageError(problems)
    with running(cluster, loaded.recipe, keep=not wait) as on_cluster:
        _submit(on_cluster, recipe, dry_run, wait, as_json)


def _submit(loaded: Loaded, recipe: Path, dry_run: bool, wait: bool, as_json: bool, placed: bool = True) -> None:
    """`placed`: the cluster is there and can be asked what fits."""
    plan = loaded.plan
    refuse(plan, "error", *(() if dry_run else ("blocked",)))
    local = plan.executor == "local"
    if placed and not local:
        plan = avoid_bad_nodes(plan, loaded.site.slurm_conf)
    script = "" if local else render(plan)
    problems = name_in_use(Path(plan.run_dir)) + missing_variables(plan)
    problems += [] if local or not placed else _placement(plan, loaded.site)
    if problems:
        raise UsageError(problems)
    if dry_run:
        _show_dry_run(plan, script, as_json)
        return
    attempt = create(loaded.recipe, plan, recipe)
    _start(attempt, plan, script, loaded.site.slurm_conf)
    _announce(attempt, plan, wait, as_json)


def resume(
    run: RunArg,
    runs: RunsOpt = None,
    wait: WaitOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Go on with a run that has ended, from its last committed step, as a new attempt."""
    directory = find_run(run, runs)
    status = status_of(directory, strict_job_query(directory))
    if status.active or status.phase == "completed":
        raise UsageError([Violation("RUN", run, f"is {status.phase}: there is nothing to resume")])
    previous = directory.latest()
    plan, job = previous.plan(), previous.job()
    if problems := missing_variables(plan):
        raise UsageError(problems)
    slurm_conf = job.slurm_conf if job else None
    if plan.executor == "slurm":
        plan = avoid_bad_nodes(plan, slurm_conf)
    attempt = directory.attempt(previous.number + 1)
    attempt.prepare(plan)
    script = "" if plan.executor == "local" else render(plan)
    _start(attempt, plan, script, slurm_conf)
    _announce(attempt, plan, wait, as_json)


def _placement(plan: Plan, site: Site) -> list[Violation]:
    return placement_problems(plan, SlurmClient(site.slurm_conf))


def _start(attempt: Attempt, plan: Plan, script: str, slurm_conf: str | None) -> None:
    """Submit an attempt. One that is not taken leaves nothing."""
    task = AgentTask(plan.run_dir, attempt.number)
    try:
        if plan.executor == "local":
            job_id = submit_local(plan, task)
        else:
            path = attempt.path / "job.sbatch"
            write_atomic(path, script)
            job_id = submit_slurm(plan, task, path, slurm_conf)
    except (PrimeslurmError, OSError):
        discard(attempt)
        raise
    attempt.record_job(JobRecord(job_id, plan.executor, time.time(), slurm_conf))


def _announce(attempt: Attempt, plan: Plan, wait: bool, as_json: bool) -> None:
    job = attempt.job()
    job_id = job.job_id if job else ""
    if as_json:
        print_json({"run": plan.run, "directory": plan.run_dir, "attempt": attempt.number, "job_id": job_id})
    else:
        show_findings(plan)
        out.print(f"submitted {plan.run} as {plan.executor} job {job_id}")
        note(f"watch it with: primeslurm status {shlex.quote(plan.run_dir)} --watch")
    if wait:
        raise typer.Exit(watch_until_done(RunDirectory(Path(plan.run_dir))))


def _show_dry_run(plan: Plan, script: str, as_json: bool) -> None:
    if as_json:
        print_json({"plan": plan.model_dump(mode="json", by_alias=True), "script": script})
        return
    show_plan(plan)
    if script:
        out.print("\njob.sbatch", style="bold")
        out.print(script, markup=False, soft_wrap=True)
    note("dry run: nothing was written or submitted")

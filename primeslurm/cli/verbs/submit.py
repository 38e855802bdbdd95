"""`primeslurm submit`, `eval` and `resume`: start a job for a recipe, an evaluation, or a run that has ended."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from primeslurm.api.recipes.loading import load
from primeslurm.api.runs.run import Run, find_run
from primeslurm.api.submission import DryRun, Submitted
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.units import count
from primeslurm.cli import options
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.findings import show_findings
from primeslurm.cli.views.plan import show_plan
from primeslurm.cli.views.tables import out
from primeslurm.recipe import Recipe
from primeslurm.slurm.environment import is_started_by_slurm

if TYPE_CHECKING:
    from primeslurm.api.testbed import ClusterSpec

DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Show plan and batch script, but submit nothing.")]
EmulateOpt = Annotated[
    bool,
    typer.Option(
        "--emulate",
        help="Run the whole job with stand-ins for engines, trainer and environments. Without --site, a Slurm cluster "
        "with fake GPUs is started on this machine, and no site file is read.",
    ),
]
WaitOpt = Annotated[bool, typer.Option("--wait", help="Show progress until the run ends.")]


def submit(
    recipe: options.RecipeArg,
    site: options.SiteOpt = None,
    set_: options.SetOpt = None,
    name: options.NameOpt = None,
    local: options.LocalOpt = False,
    emulate: EmulateOpt = False,
    dry_run: DryRunOpt = False,
    wait: WaitOpt = False,
    no_slurm: options.NoSlurmOpt = False,
    verbose: options.VerboseOpt = False,
    as_json: options.JsonOpt = False,
) -> None:
    """Submit a recipe as one job, or run it on this machine.

    The recipe is checked first, and nothing is submitted if the check finds an error.

    Examples:
        primeslurm submit my.yaml --dry-run
        primeslurm submit my.yaml --name try-1 --set max_steps=10
        primeslurm submit recipes/reverse_text.yaml --local --wait
    """
    loaded = load(recipe, site=site, overrides=set_ or (), name=name, local=local, emulate=emulate)
    if dry_run:
        _show_dry_run(loaded.dry_run(slurm=not no_slurm), loaded.recipe, as_json, verbose=verbose)
        if loaded.emulated:
            note("Stand-ins load no model, data or environments. Check them with `primeslurm check`.")
        return
    if no_slurm:
        why = "a submission needs Slurm"
        raise UsageError([Violation("--no-slurm", "", why, "add --dry-run, or use --local")])
    # The run needs its embedded cluster after this command ends, unless the command waits for the run.
    with loaded.on_cluster(keep=not wait, starting=_note_start) as ready:
        _announce(ready.start(), wait, as_json, continues=loaded.cluster is None)
    if loaded.cluster is not None:
        note(f"stop its cluster with: primeslurm cluster down --name {shlex.quote(loaded.cluster.name)}")


def eval_(
    target: Annotated[
        str,
        typer.Argument(metavar="RECIPE|RUN", help="Recipe file, or name or directory of a run.", show_default=False),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Step of the run's policy. Default: the newest.", metavar="N")
    ] = None,
    site: options.SiteOpt = None,
    set_: options.SetOpt = None,
    name: options.NameOpt = None,
    runs: options.RunsOpt = None,
    local: options.LocalOpt = False,
    dry_run: DryRunOpt = False,
    wait: WaitOpt = False,
    as_json: options.JsonOpt = False,
) -> None:
    """Evaluate a model, or a policy of a run.

    The job has engines and environments, but no trainer. The section `evaluation` of the recipe names the environments.
    `primeslurm summary` and `primeslurm report` show the results.

    Examples:
        primeslurm eval my.yaml
        primeslurm eval my-run --step 200
    """
    from primeslurm.api.recipes.evaluation import load_evaluation

    loaded = load_evaluation(target, step=step, runs=runs, site=site, overrides=set_ or (), name=name, local=local)
    if dry_run:
        _show_dry_run(loaded.dry_run(), loaded.recipe, as_json)
    else:
        _announce(loaded.start(), wait, as_json)


def resume(
    run: options.RunArg,
    runs: options.RunsOpt = None,
    wait: WaitOpt = False,
    as_json: options.JsonOpt = False,
) -> None:
    """Resume a run from its last checkpoint.

    The run must have ended. It keeps its directory and gets a new attempt.

    Examples:
        primeslurm resume my-run
    """
    _announce(find_run(run, runs).start_again(), wait, as_json)


def _note_start(spec: ClusterSpec) -> None:
    nodes = f"{count(spec.nodes, 'GPU node')} and {count(spec.control_nodes, 'control node')}"
    note(f"starting an embedded cluster of {nodes}")


def _announce(submitted: Submitted, wait: bool, as_json: bool, *, continues: bool = True) -> None:
    """Print the submitted job, and with `wait` its progress. `continues`: the run outlives this command."""
    plan = submitted.plan
    if as_json:
        fields = {"attempt": submitted.attempt, "job_id": submitted.job_id}
        print_json({"run": plan.run, "directory": plan.run_dir, **fields})
    else:
        show_findings(plan)
        out.print(f"submitted {plan.run} as {plan.executor} job {submitted.job_id}")
        run = shlex.quote(plan.run_dir)
        note(f"watch it with: primeslurm status {run} --watch")
        if not wait:
            note(f"end it with a last checkpoint: primeslurm cancel {run}")
    # slurmd kills all processes of a step when its first process ends.
    if not wait and plan.executor == "local" and is_started_by_slurm(os.environ):
        note("warning: Slurm ends this run together with the step or script that started it. Use --wait in both.")
    if wait:
        from primeslurm.cli.verbs.watch import watch_until_done

        try:
            raise typer.Exit(watch_until_done(Run(Path(plan.run_dir))))
        except KeyboardInterrupt:
            if continues:
                cancel = f"primeslurm cancel {shlex.quote(plan.run_dir)}"
                note(f"{plan.run} continues; to end it with a last checkpoint: {cancel}")
            raise


def _show_dry_run(result: DryRun, recipe: Recipe, as_json: bool, *, verbose: bool = False) -> None:
    if as_json:
        print_json({"plan": result.plan.model_dump(mode="json", by_alias=True), "script": result.script})
    else:
        show_plan(result.plan, recipe, placement=True)
        if result.script:
            out.print("\njob.sbatch", style="bold")
            out.print(result.script, markup=False, soft_wrap=True)
    for text in result.unasked:
        note(f"note: slurm: {text}")
    if verbose and result.details:
        note(result.details)
    note("dry run: nothing was written or submitted")

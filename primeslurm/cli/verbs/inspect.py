"""`primeslurm plan`, `render`, `check` and `schema`: show what a recipe would do, without changing anything."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from primeslurm.api.recipes.loading import check as examine
from primeslurm.api.recipes.loading import load
from primeslurm.base.errors import ExitCode
from primeslurm.cli import options
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.findings import show_all, summary
from primeslurm.recipe import Recipe, Site


def plan(
    recipe: options.RecipeArg,
    site: options.SiteOpt = None,
    set_: options.SetOpt = None,
    name: options.NameOpt = None,
    local: options.LocalOpt = False,
    placement: Annotated[bool, typer.Option("--placement", help="Show which process runs where, too.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Show the placement with one row per process.")] = False,
    node: Annotated[
        int | None, typer.Option("--node", help="Show only the commands of a node's processes.", metavar="N")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every number of the plan, too.")] = False,
    as_json: options.JsonOpt = False,
) -> None:
    """Show whether a recipe fits, and what it needs.

    The plan says which nodes and GPUs the run uses, how much GPU memory each role has left, how long starting and a
    step take, and how large checkpoints are. Neither Slurm nor the files of the model are needed.

    Examples:
        primeslurm plan my.yaml
        primeslurm plan my.yaml --set deployment.train.nodes=4 --placement
        primeslurm plan my.yaml --node 0
    """
    loaded = load(recipe, site=site, overrides=set_ or (), name=name, local=local)
    if as_json:
        sys.stdout.write(loaded.plan().to_json())
    else:
        # rich takes long to import, and `--json` does not need it.
        from primeslurm.cli.views.plan import show_commands, show_plan

        if node is not None:
            show_commands(loaded.plan(), node)
            return
        show_plan(loaded.plan(), loaded.recipe, placement=placement, every=every, verbose=verbose)


def render_(
    recipe: options.RecipeArg,
    site: options.SiteOpt = None,
    set_: options.SetOpt = None,
    name: options.NameOpt = None,
) -> None:
    """Print the batch script that submit sends to Slurm.

    Examples:
        primeslurm render my.yaml > job.sbatch
    """
    sys.stdout.write(load(recipe, site=site, overrides=set_ or (), name=name).render())


def check(
    recipe: options.RecipeArg,
    site: options.SiteOpt = None,
    set_: options.SetOpt = None,
    name: options.NameOpt = None,
    local: options.LocalOpt = False,
    no_slurm: options.NoSlurmOpt = False,
    verbose: options.VerboseOpt = False,
    as_json: options.JsonOpt = False,
) -> None:
    """Check a recipe against site, model files and Slurm.

    It reports every error, blocker, warning and note in one pass, and writes nothing. A blocker refuses `submit` on
    this machine only, for example a model that is not downloaded yet. Exit code 0: the recipe is valid, but it may be
    blocked here. Exit code 2: it has errors.

    Examples:
        primeslurm check my.yaml
        primeslurm check my.yaml --local --set max_steps=10
    """
    result = examine(recipe, site=site, overrides=set_ or (), name=name, local=local, slurm=not no_slurm)
    if as_json:
        print_json([finding.model_dump() for finding in result.findings])
    else:
        show_all(result.findings)
        for text in result.details if verbose else ():
            note(text)
        note(summary(result, result.plan.run if result.plan else str(recipe)))
    if not result.ok:
        raise typer.Exit(ExitCode.BAD_INPUT)


def schema(site: bool = typer.Option(False, "--site", help="Print the schema of site files.")) -> None:
    """Print the JSON schema of recipes or of site files.

    Editors use it to complete and check keys.

    Examples:
        primeslurm schema > recipe.schema.json
    """
    print_json((Site if site else Recipe).model_json_schema(by_alias=True))

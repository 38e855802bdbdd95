"""Verbs that look at a recipe and change nothing: plan, render, check, schema."""

from __future__ import annotations

import sys

import typer

from primeslurm.api.loading import check as examine
from primeslurm.api.loading import load
from primeslurm.cli.options import (
    AllOpt,
    JsonOpt,
    LocalOpt,
    NameOpt,
    NoSlurmOpt,
    RecipeArg,
    SetOpt,
    SiteOpt,
    VerboseOpt,
)
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.verdict import show_all, summary
from primeslurm.errors import ExitCode
from primeslurm.recipe import Recipe, Site


def plan(
    recipe: RecipeArg,
    site: SiteOpt = None,
    set_: SetOpt = None,
    name: NameOpt = None,
    local: LocalOpt = False,
    every: AllOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Show the placement that a recipe gives: node x process x port x GPU, and derived totals."""
    found = load(recipe, site=site, overrides=set_ or (), name=name, local=local).plan()
    if as_json:
        sys.stdout.write(found.to_json())
    else:
        from primeslurm.cli.views.placement import show_plan

        show_plan(found, every=every)


def render_(
    recipe: RecipeArg,
    site: SiteOpt = None,
    set_: SetOpt = None,
    name: NameOpt = None,
) -> None:
    """Print the batch script, byte for byte as it would be submitted."""
    sys.stdout.write(load(recipe, site=site, overrides=set_ or (), name=name).render())


def check(
    recipe: RecipeArg,
    site: SiteOpt = None,
    set_: SetOpt = None,
    name: NameOpt = None,
    local: LocalOpt = False,
    no_slurm: NoSlurmOpt = False,
    verbose: VerboseOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Check recipe, placement, compatibility, memory and model files; exit code 2 if it cannot run.

    It finds everything in one pass, and asks Slurm what `submit` asks. Exit code 0: the recipe is valid. It may still
    be blocked on this machine, for example by a model that is not here. Exit code 2: it has errors.
    """
    found = examine(recipe, site=site, overrides=set_ or (), name=name, local=local, slurm=not no_slurm)
    if as_json:
        print_json([finding.model_dump() for finding in found.findings])
    else:
        show_all(found.findings)
        for text in found.details if verbose else ():
            note(text)
        note(summary(found, found.plan.run if found.plan else str(recipe)))
    if not found.ok:
        raise typer.Exit(ExitCode.BAD_INPUT)


def schema(site: bool = typer.Option(False, "--site", help="The schema of site files instead.")) -> None:
    """Print the JSON schema of recipes, for editors."""
    print_json((Site if site else Recipe).model_json_schema(by_alias=True))

"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArg = Annotated[Path, typer.Argument(help="Recipe file.", show_default=False)]
SetOpt = Annotated[list[str] | None, typer.Option("--set", help="Override a field.", metavar="KEY=VALUE")]
NameOpt = Annotated[str | None, typer.Option("--name", help="Name of the run instead of the recipe's.")]
SiteOpt = Annotated[
    Path | None, typer.Option("--site", help="Site file. Default: ./site.yaml or ~/.primeslurm/site.yaml")
]
LocalOpt = Annotated[bool, typer.Option("--local", help="Run on this machine without Slurm.")]
NoSlurmOpt = Annotated[bool, typer.Option("--no-slurm", help="Do not ask Slurm.")]
VerboseOpt = Annotated[bool, typer.Option("--verbose", help="Show what Slurm's commands answered.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]
AllOpt = Annotated[bool, typer.Option("--all", help="Every row; else rows that are alike are put together.")]
RunArg = Annotated[str, typer.Argument(help="Name of a run, or its directory.", show_default=False)]
RunsOpt = Annotated[Path | None, typer.Option("--runs", help="Directory of all runs; else the site file's, or ./runs.")]

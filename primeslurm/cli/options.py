"""Options that several verbs share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

RecipeArg = Annotated[
    Path,
    typer.Argument(help="Recipe file, or the name of a ready recipe.", metavar="RECIPE", show_default=False),
]
SetOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a field of the recipe, for example --set max_steps=10. Repeatable.", metavar="KEY=VALUE"
    ),
]
NameOpt = Annotated[
    str | None, typer.Option("--name", help="Name the run. Default: the recipe's name.", metavar="NAME")
]
SiteOpt = Annotated[
    Path | None,
    typer.Option("--site", help="Site file. Default: ./site.yaml, then ~/.primeslurm/site.yaml.", metavar="FILE"),
]
LocalOpt = Annotated[bool, typer.Option("--local", help="Use this machine, without Slurm.")]
NoSlurmOpt = Annotated[bool, typer.Option("--no-slurm", help="Do not ask Slurm.")]
VerboseOpt = Annotated[bool, typer.Option("--verbose", help="Also show the answers of Slurm's commands.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
YesOpt = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
RunArg = Annotated[str, typer.Argument(help="Name or directory of a run.", metavar="RUN", show_default=False)]
RunsOpt = Annotated[
    Path | None,
    typer.Option("--runs", help="Directory of runs. Default: the site file's, or ./runs.", metavar="DIR"),
]
AttemptOpt = Annotated[
    int | None, typer.Option("--attempt", help="Number of the attempt. Default: the newest.", metavar="N")
]


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal, and end the command unless the answer is yes. Scripts are not asked."""
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        typer.confirm(question, abort=True, err=True)

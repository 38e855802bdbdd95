"""`primeslurm diff`: compare two recipes or runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from primeslurm.api.recipes.comparison import compare
from primeslurm.base.errors import ExitCode
from primeslurm.cli.options import JsonOpt, LocalOpt, RunsOpt, SiteOpt
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.differences import show_comparison


def diff_(
    a: Annotated[str, typer.Argument(help="Recipe file, or name or directory of a run.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Recipe file, or name or directory of a run.", metavar="B")],
    site: SiteOpt = None,
    runs: RunsOpt = None,
    local: LocalOpt = False,
    every: Annotated[bool, typer.Option("--all", help="Show differences in job, processes and ports, too.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Compare two recipes or runs.

    It shows the fields of the recipes that differ, and what that changes: nodes, GPUs, memory, KV cache, times. Names
    and directories of runs are not compared.

    Examples:
        primeslurm diff recipes/glm5_pd.yaml recipes/glm5_r3.yaml
        primeslurm diff my-run my.yaml --all
    """
    comparison = compare(a, b, site=site, runs=runs, local=local)
    if as_json:
        print_json(msgspec.to_builtins([*comparison.recipe, *comparison.plan]))
    elif comparison.same:
        note("no difference")
    else:
        show_comparison(Path(a).name, Path(b).name, comparison, every=every)
    if not comparison.same:
        raise typer.Exit(ExitCode.FAILED)

"""`primeslurm init`: write a site file for this cluster, and a first recipe."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.api.setup.first_files import write_first_files
from primeslurm.cli.options import JsonOpt
from primeslurm.cli.output import note, print_json


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files are written.")] = Path(),
    as_json: JsonOpt = False,
) -> None:
    """Write a site file for this cluster, and a first recipe.

    It queries Slurm for partitions, GPUs, cores, memory, time limits, accounts and QOS. `site.yaml` describes the
    largest partition with GPUs that you may use, and `recipe.yaml` is a run that fits on one of its nodes. Without
    Slurm, the recipe runs on this machine. If SLURM_CONF belongs to an embedded cluster, `site.yaml` is a copy of the
    cluster's site file. Existing files are never overwritten.

    Examples:
        primeslurm init
        primeslurm init ~/experiments/first --json
    """
    first = write_first_files(directory)
    if as_json:
        print_json(
            {
                "recipe": str(first.recipe),
                "site": str(first.site) if first.site else None,
                "local": first.site is None,
                "why_local": first.why_local,
                "embedded": first.embedded,
                "found": asdict(first.proposal) if first.proposal else None,
            }
        )
        return
    for path in filter(None, (first.site, first.recipe)):
        typer.echo(path)
    if first.site is None:
        note(f"{first.why_local}. The recipe is for this machine, without a site file.")
    elif first.embedded:
        note(f"{first.site} is the site file of embedded cluster {first.embedded}, whose GPUs are fake.")
    else:
        note(f"Read {first.site}: check the lines marked LOOK AT THIS.")
    option = " --local" if first.site is None else ""
    place = "" if directory == Path() else f"cd {shlex.quote(str(directory))} && "
    note(f"Next: {place}primeslurm check {first.recipe.name}{option}")

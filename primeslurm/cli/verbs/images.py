"""`primeslurm images`: build the container images of Harbor tasks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.api.images import building, wanted
from primeslurm.base.units import count
from primeslurm.cli.options import JsonOpt
from primeslurm.cli.output import note, print_json


def images(
    tasks: Annotated[
        Path,
        typer.Argument(
            help="Directory of Harbor tasks, or a recipe that names one.", metavar="TASKS|RECIPE", show_default=False
        ),
    ],
    runtime: Annotated[
        str | None, typer.Option(help="apptainer, docker or podman. Default: apptainer.", metavar="RUNTIME")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--images", help="Directory of images. Default: .images in the tasks' directory.", metavar="DIR"),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Number of parallel builds.", metavar="N")] = 2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the build commands, but build nothing.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Build the container images of Harbor tasks.

    A task with a Dockerfile gets an image. For apptainer, a task that names an image of a registry gets that image
    as a file. Tasks with the same Dockerfile share one image, and images that exist are not built again.

    Examples:
        primeslurm images /shared/data/swe --jobs 8
        primeslurm images my.yaml --dry-run
    """
    needed = wanted.wanted_images(wanted.sources(tasks, runtime, directory))
    # If no image is missing, the build programs need not be installed.
    missing = [image for image in needed if not building.is_there(image)]
    builder = building.ImageBuilder(missing, dry_run)
    if dry_run:
        for image in missing:
            for command in builder.commands(image, Path("image.tar"), Path(image.name)):
                note(shlex.join(command))
        for problem in builder.problems:
            note(f"this machine cannot run these commands: {problem.why} ({problem.fix})")
    else:
        builder.build(missing, jobs, note)
    if as_json:
        unbuilt = missing if dry_run else []
        rows = [{"image": each.name, "runtime": each.runtime, "tasks": each.tasks} for each in needed]
        print_json([{**row, "built": each not in unbuilt} for row, each in zip(rows, needed, strict=True)])
        return
    for image in needed:
        print(f"{image.name}  {' '.join(image.tasks)}")
    how = "to build" if dry_run else "built"
    note(f"{count(len(needed), 'image')}: {len(missing)} {how}, {len(needed) - len(missing)} there already")

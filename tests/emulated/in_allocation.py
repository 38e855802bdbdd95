"""Runs a ready recipe with emulated processes and without Slurm, and prints what its processes were given.

It runs on the node where it is started, in a Slurm allocation.

Usage: python -m tests.emulated.in_allocation RECIPE DIRECTORY [PATH=VALUE ...]. It prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from primeslurm.api.runs.run import Run
from primeslurm.api.sites import find_site, with_python
from primeslurm.plan.planner import derive
from primeslurm.plan.stand_ins import emulate
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.run.history import rows
from tests.support.runs import start_local


def main(recipe_path: Path, directory: Path, settings: list[str]) -> None:
    """Start the run, inspect its processes, and wait for its end."""
    os.chdir(directory)
    recipe = load_recipe(recipe_path, settings)
    site = with_python(find_site(None, local=True))
    plan = emulate(derive(recipe, site, directory / "runs" / recipe.name, local=True))
    start_local(recipe, plan, recipe_path)
    run = Run(Path(plan.run_dir))
    gpus: dict[str, str] = {}
    while run.status().active:
        for process in run.status(processes=True).processes:
            if process.pid and process.role in ("trainer", "engine"):
                gpus[process.name] = _gpus_of(process.pid) or gpus.get(process.name, "")
        time.sleep(0.1)
    kind = site.nodes["default"]
    print(
        json.dumps(
            {"site": [kind.gpus, kind.cpus], "gpus": gpus, "phase": run.status().phase, "steps": len(rows(run.path))}
        )
    )


def _gpus_of(pid: int) -> str:
    """Return CUDA_VISIBLE_DEVICES of a process; empty if it has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((each.partition(b"=")[2].decode() for each in variables if each.startswith(b"CUDA_VISIBLE")), "")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])

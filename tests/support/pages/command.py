"""The `primeslurm` and `python` of a page's reader: the real ones, except that no job starts and nothing is installed.

Whatever is submitted is planned and refused as ever. Then a finished run of that name is written, so that the reader
can look at it: its plan is real, its metrics are made up. `install` prints its commands, and a model is a small one.
Usage: python -m tests.support.pages.command primeslurm ARGUMENTS, or ... python SCRIPT ARGUMENTS
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from primeslurm.api.loading import LoadedRecipe
from primeslurm.api.submission import Submitted
from primeslurm.cli import main
from primeslurm.plan.planner import refuse
from primeslurm.recipe.reading import recipe_files
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.run.directory import RunDirectory, create


def finish(loaded: LoadedRecipe) -> Submitted:
    """Write the run directory of a finished run."""
    plan = loaded.plan()
    refuse(plan, "error")
    attempt = create(loaded.recipe, plan, loaded.source)
    attempt.record_job(JobRecord("1", "local", time.time()))
    steps = loaded.recipe.max_steps
    rows = [
        {"step": step, "time": time.time(), "reward/mean": step / steps, "trainer/loss": 0.5, "staleness/mean": 1.0}
        for step in range(1, steps + 1)
    ]
    Path(plan.run_dir, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    attempt.record_end(EndRecord("completed", "all steps done", "", steps, False, "", time.time()))
    return Submitted(plan, attempt.number, "1")


@contextmanager
def here(loaded: LoadedRecipe, **_: object) -> Iterator[LoadedRecipe]:
    """Start no embedded cluster for an emulated run."""
    yield loaded


def shipped(name: str) -> Path:
    """Return a ready recipe of the reader: its `/shared` is a directory of the test."""
    return Path(os.environ["HOME"], "checkout", name)


def install(words: list[str]) -> None:
    """Leave a small model where `install --model NAME` would leave that one. Else only print the commands."""
    if "--model" in words and "--dry-run" not in words:
        name = words[words.index("--model") + 1]
        where = Path(words[words.index("--to") + 1]) if "--to" in words else Path(".primeslurm", name, "model")
        shutil.copytree(Path(os.environ["HOME"], "model"), where, dirs_exist_ok=True)
        sys.argv.append("--help")  # options that do not exist are refused
    elif "--dry-run" not in words:
        sys.argv.append("--dry-run")


def export(words: list[str]) -> None:
    """Leave a small model where `export RUN DIR` would leave the run's."""
    if "--help" not in words:
        assert RunDirectory(Path("runs", words[0])).exists(), f"no run is called {words[0]}"
        target = Path(words[1])
        assert target.absolute().parent.is_dir() and not target.exists(), f"{target} cannot be made"
        shutil.copytree(Path(os.environ["HOME"], "model"), target)
        sys.argv.append("--help")


if __name__ == "__main__":
    recipe_files.shipped = shipped
    LoadedRecipe.start = finish  # type: ignore[method-assign]
    LoadedRecipe.on_cluster = here  # type: ignore[method-assign, assignment]
    program, *words = sys.argv[1:]
    if program == "primeslurm":
        sys.argv = [program, *words]
        if replaced := {"install": install, "export": export}.get(words[0] if words else ""):
            replaced(words[1:])
        main()
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")

"""The `primeslurm` and `python` of a page's reader: the real ones, except that no job starts.

Whatever is submitted is planned and refused as ever. Then a finished run of that name is written, so that the reader
can look at it: its plan is real, its metrics are made up.
Usage: python -m tests.support.pages.command primeslurm ARGUMENTS, or ... python SCRIPT ARGUMENTS
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from primeslurm.api.loading import LoadedRecipe
from primeslurm.api.submission import Submitted
from primeslurm.cli import main
from primeslurm.plan.planner import refuse
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.run.directory import create


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


if __name__ == "__main__":
    LoadedRecipe.start = finish  # type: ignore[method-assign]
    LoadedRecipe.on_cluster = here  # type: ignore[method-assign, assignment]
    program, *words = sys.argv[1:]
    if program == "primeslurm":
        sys.argv = [program, *words]
        main()
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")

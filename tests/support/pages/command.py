"""The `primeslurm` and `python` of a page's reader. They are the real ones, but start no job and install nothing.

A submission is planned and checked as usual. Then a finished run of that name is written, with a real plan and invented
metrics. `install` prints its commands, and writes a small model.
Usage: python -m tests.support.pages.command primeslurm ARGUMENTS, or ... python SCRIPT ARGUMENTS
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from primeslurm.api.recipes.loading import LoadedRecipe
from primeslurm.api.submission import Submitted
from primeslurm.cli import main
from primeslurm.plan.checks import environments
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


def run_forked(
    interpreter: environments.Interpreter, module: str, request: str, limit_s: float, tmp: Path | None = None
) -> tuple[int, str, str]:
    """Run a probe as `run_module` does, but forked, because this process has most of its imports."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(dir=tmp) as directory:
        files = [Path(directory, name) for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(request)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for target, file in enumerate(files):
                    os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), target)
                os.environ.update({"HF_HUB_OFFLINE": "1", **interpreter.env, "TMPDIR": directory})
                os.chdir(directory)
                sys.argv = [module]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), files[1].read_text(), files[2].read_text()


def shipped(name: str) -> Path:
    """Return a ready recipe whose `/shared` is a directory of the test."""
    return Path(os.environ["HOME"], "checkout", name)


def install(words: list[str]) -> None:
    """Write a small model where `install --model NAME` would, or only print the commands."""
    if "--model" in words and "--dry-run" not in words:
        name = words[words.index("--model") + 1]
        where = Path(words[words.index("--to") + 1]) if "--to" in words else Path(".primeslurm", name, "model")
        shutil.copytree(Path(os.environ["HOME"], "model"), where, dirs_exist_ok=True)
        sys.argv.append("--help")  # refuses options that do not exist
    elif "--dry-run" not in words:
        sys.argv.append("--dry-run")


def export(words: list[str]) -> None:
    """Write a small model where `export RUN DIR` would."""
    if "--help" not in words:
        assert RunDirectory(Path("runs", words[0])).exists(), f"no run is called {words[0]}"
        target = Path(words[1])
        assert target.absolute().parent.is_dir() and not target.exists(), f"{target} cannot be made"
        shutil.copytree(Path(os.environ["HOME"], "model"), target)
        sys.argv.append("--help")


if __name__ == "__main__":
    # The forking process may have files as streams where these are pipes.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    recipe_files.shipped = shipped
    environments.run_module = run_forked
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

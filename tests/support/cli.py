"""Runs commands and returns exit code, stdout and stderr."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.support.forks import server

ROOT = str(Path(__file__).resolve().parents[2])
COMMAND = (
    "primeslurm.api.checks.environments",
    "primeslurm.api.checks.recipe_check",
    "primeslurm.api.runs.run",
    "primeslurm.api.sites",
    "primeslurm.api.submission",
    "primeslurm.base.templating",
    "primeslurm.cli",
    "primeslurm.plan.checks",
    "primeslurm.run.rollouts.query",
    "primeslurm.run.status.summary",
    "pydantic.type_adapter",
    "rich.live",
    "rich.table",
    "typer.rich_utils",
    *(f"primeslurm.models.{path.parent.name}.spec" for path in sorted(Path(ROOT).glob("primeslurm/models/*/spec.py"))),
)
"""Modules that most commands import, also lazily: imports take three quarters of the time of a command.

Not those of the verbs and their output: they read the width of the terminal at import.
"""
NO_TERMINAL = {"_TYPER_FORCE_DISABLE_TERMINAL": "1"}
"""Typer colours its help on GitHub's runners, although there is no terminal."""


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def primeslurm(
    *args: str | Path, cwd: Path, timeout_s: float = 600, path: Path | None = None, columns: int = 120, **variables: str
) -> Result:
    """Run `primeslurm ARGS` in a forked process with its own home. `path` is put first on PATH."""
    env = {**os.environ, "HOME": str(cwd), "COLUMNS": str(columns), "PYTHONPATH": ROOT, **NO_TERMINAL, **variables}
    if path is not None:
        env["PATH"] = f"{path}:{env['PATH']}"
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        forked = server(COMMAND, **NO_TERMINAL).start("primeslurm", *args, stdout=out, stderr=err, env=env, cwd=cwd)
        try:
            code = forked.wait(timeout_s)
        finally:
            forked.kill()
        return Result(code, *(_read(each) for each in (out, err)))


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def run_python(*args: str | Path, cwd: Path, **variables: str) -> Result:
    """Run `python ARGS` with this checkout's package."""
    env = {**os.environ, "PYTHONPATH": ROOT, **variables}
    argv = [sys.executable, *map(str, args)]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    return Result(done.returncode, done.stdout, done.stderr)

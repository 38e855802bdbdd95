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
COMMAND = ("primeslurm.cli", "primeslurm.api.runs.run", "primeslurm.api.sites", "primeslurm.plan.checks")
"""Modules that most commands import."""
NO_TERMINAL = {"_TYPER_FORCE_DISABLE_TERMINAL": "1"}
"""Typer colours its help on GitHub's runners, although there is no terminal."""


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def primeslurm(
    *args: str | Path, cwd: Path, timeout_s: float = 600, path: Path | None = None, columns: int = 120
) -> Result:
    """Run `primeslurm ARGS` in a forked process with its own home. `path` is put first on PATH."""
    env = {**os.environ, "HOME": str(cwd), "COLUMNS": str(columns), "PYTHONPATH": ROOT, **NO_TERMINAL}
    if path is not None:
        env["PATH"] = f"{path}:{env['PATH']}"
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        forked = server(COMMAND).start("primeslurm", *args, stdout=out, stderr=err, env=env, cwd=cwd)
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

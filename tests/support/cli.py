"""Run whole commands and compare exit code, stdout and stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Result:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


def primeslurm(*args: str | Path, cwd: Path, timeout_s: float = 600, path: Path | None = None) -> Result:
    """`primeslurm ARGS` as a user runs it, in a home of its own. `path`: where commands are looked for first."""
    env = {**os.environ, "HOME": str(cwd), "COLUMNS": "120", "PYTHONPATH": ROOT}
    if path is not None:
        env["PATH"] = f"{path}:{env['PATH']}"
    argv = [sys.executable, "-m", "primeslurm", *map(str, args)]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


def run_python(*args: str | Path, cwd: Path, **variables: str) -> Result:
    """`python ARGS` with this checkout's package."""
    env = {**os.environ, "PYTHONPATH": ROOT, **variables}
    argv = [sys.executable, *map(str, args)]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    return Result(done.returncode, done.stdout, done.stderr)

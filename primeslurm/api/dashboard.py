"""The dashboard over a directory of runs."""

from __future__ import annotations

from pathlib import Path

from primeslurm.api.jobs import looking_query
from primeslurm.api.sites import runs_directory
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.paths import is_dir, is_file
from primeslurm.dashboard.server import LOOPBACK, Dashboard, prepare


def dashboard(runs: str | Path | None = None, *, host: str = LOOPBACK[0], port: int | None = None) -> Dashboard:
    """Return a dashboard over all runs of a directory. Its `serve` answers requests until it is interrupted.

    Args:
        runs: directory with the runs to show; by default the site file's, or ./runs.
        host: address or name of this machine to listen on.
        port: port to listen on. None: the first free port from 8420 on.

    Raises:
        UsageError: there is no such directory, or the port cannot be used.
    """
    directory = runs_directory(runs).absolute()
    problems = _problems(directory)
    try:
        served = prepare(directory, looking_query, host, port)
    except UsageError as error:
        raise UsageError([*problems, *error.violations]) from None
    if problems:
        served.listener.close()
        raise UsageError(problems)
    return served


def _problems(directory: Path) -> list[Violation]:
    if not is_dir(directory):
        return [Violation("RUNS_DIR", str(directory), "is no directory", "name the directory of your runs")]
    if is_file(directory / "lock.json"):
        fix = f"name the directory that holds it: {directory.parent}"
        return [Violation("RUNS_DIR", str(directory), "is a run, not a directory of runs", fix)]
    return []

"""Finding runs, and verbs over them: runs, cancel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.cli.options import JsonOpt, find_site
from primeslurm.cli.output import light_table, note, out, print_json
from primeslurm.errors import ClusterError, RunError, UsageError, Violation
from primeslurm.plan.model import Plan
from primeslurm.recipe.explain import suggestion
from primeslurm.recipe.paths import is_dir
from primeslurm.records.attempt import JobRecord
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.status import JobQuery, RunStatus, read_status
from primeslurm.slurm import local
from primeslurm.slurm.client import SlurmClient

RunArg = Annotated[str, typer.Argument(help="Name of a run, or its directory.", show_default=False)]
RunsOpt = Annotated[Path | None, typer.Option("--runs", help="Directory of all runs; else the site file's, or ./runs.")]

CANCEL_GRACE_S = 45.0
"""From the request to end in good order to scancel. An agent gives its processes 15 s."""


def runs_directory(runs: Path | None) -> Path:
    """Where runs live: as given, else as the site file says, else ./runs."""
    if runs is not None:
        return runs
    try:
        return Path(find_site(None).runs)
    except UsageError:
        return Path("runs")


def find_run(name: str, runs: Path | None) -> RunDirectory:
    """A run by name or directory. Raises UsageError with the nearest name."""
    root = runs_directory(runs)
    for candidate in (root / name, Path(name)):
        directory = RunDirectory(candidate.absolute())
        if directory.exists():
            return RunDirectory(candidate.resolve())
        if is_dir(candidate / "attempts"):
            raise RunError(f"{directory.path} is damaged: it has no lock.json")
    names = [d.name for d in all_runs(root)]
    raise UsageError([Violation("RUN", name, f"no such run in {root}", suggestion(name, names))])


def all_runs(root: Path) -> list[RunDirectory]:
    """Every run below a directory, oldest first."""
    found = [RunDirectory(path) for path in root.absolute().iterdir()] if is_dir(root) else []
    return sorted((run for run in found if run.exists()), key=lambda run: run.created_at)


def attempt_of(run: RunDirectory, number: int | None) -> Attempt:
    """An attempt by its number, or the newest. Raises UsageError, or RunError if there is none."""
    newest = run.latest()
    if number is None:
        return newest
    known = {attempt.number: attempt for attempt in run.attempts()}
    if number not in known:
        why = f"the attempts are {', '.join(map(str, known))}"
        raise UsageError([Violation("--attempt", str(number), why, f"nearest: {newest.number}")])
    return known[number]


@contextlib.contextmanager
def reading(run: RunDirectory) -> Iterator[None]:
    """For what reads a run: its records are not validated as a whole, and may be damaged or of another release.

    Raises:
        RunError: something in them is not what it should be.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or run.path} cannot be read: {error.strerror}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise RunError(f"{run.path} is damaged, or was made by another release ({why})") from error


def status_of(run: RunDirectory, query: JobQuery, *, processes: bool = False) -> RunStatus:
    """`read_status` for a user. Raises RunError also for damaged records."""
    with reading(run):
        return read_status(run, query, processes=processes)


def job_query(run: RunDirectory) -> JobQuery:
    """Asks whoever runs the job: Slurm, or the process table. A Slurm that does not answer is taken to know no job."""
    ask = strict_job_query(run)

    def ask_or_warn(job: JobRecord) -> str | None:
        try:
            return ask(job)
        except ClusterError as error:
            note(f"warning: {error}")
            return None

    return ask_or_warn


def strict_job_query(run: RunDirectory) -> JobQuery:
    """The same, where much depends on the answer: raises ClusterError if Slurm gives none."""

    def ask(job: JobRecord) -> str | None:
        if job.executor == "local":
            return "RUNNING" if local.is_running(run.latest().plan(), job.job_id) else None
        if job.slurm_conf is not None and not Path(job.slurm_conf).is_file():
            return None  # an embedded cluster that is down has no jobs
        state = SlurmClient(job.slurm_conf).job(job.job_id)
        if state is None:
            return None
        return f"{state.state} ({state.reason})" if state.reason and state.state == "PENDING" else state.state

    return ask


def runs(runs: RunsOpt = None, as_json: JsonOpt = False) -> None:
    """List all runs."""
    rows = [row for run in all_runs(runs_directory(runs)) if (row := _row(run)) is not None]
    if as_json:
        keys = ("run", "run_id", "phase", "attempt", "job_id", "step", "max_steps", "committed_step", "directory")
        print_json([{key: getattr(row, key) for key in keys} for row in rows])
        return
    table = light_table("run", "phase", "attempt", "job", "step", "committed")
    for row in rows:
        step = f"{row.step if row.step is not None else '-'}/{row.max_steps}"
        table.add_row(row.run, row.phase, str(row.attempt), row.job_id or "-", step, str(row.committed_step or "-"))
    out.print(table)


def _row(run: RunDirectory) -> RunStatus | None:
    """The status of one of many: what is wrong with it does not hide the others."""
    try:
        return status_of(run, job_query(run))
    except RunError as error:
        note(f"warning: {error}")
        return None


def cancel(run: RunArg, runs: RunsOpt = None) -> None:
    """End a run in good order, and its job. Committed checkpoints stay; `resume` goes on from them."""
    directory = find_run(run, runs)
    query = job_query(directory)
    status = status_of(directory, query)
    if not status.active and status.phase != "lost":
        note(f"{run} is {status.phase}: nothing to cancel")
        return
    attempt = directory.latest()
    attempt.cancel_file.touch()
    if status.phase not in ("pending", "requeued", "lost"):
        deadline = time.monotonic() + CANCEL_GRACE_S
        while time.monotonic() < deadline and attempt.end() is None:
            time.sleep(0.5)
    if job := attempt.job():
        _end_job(attempt.plan(), job)
        deadline = time.monotonic() + CANCEL_GRACE_S
        while time.monotonic() < deadline and (query(job) or "").startswith(("RUNNING", "COMPLETING", "PENDING")):
            time.sleep(0.5)
    note(f"{run} is cancelled")


def _end_job(plan: Plan, job: JobRecord) -> None:
    if job.executor == "slurm":
        client = SlurmClient(job.slurm_conf)
        state = client.job(job.job_id)
        if state is not None and state.active:
            client.cancel(job.job_id)
    else:
        with contextlib.suppress(RunError):  # it has ended by itself
            local.cancel(plan, job.job_id)

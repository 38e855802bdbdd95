"""Runs that were submitted: finding them, their status, waiting for them, ending them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primeslurm.api.jobs import OnSilence, end_job, job_query, queries, settle
from primeslurm.api.sites import runs_directory
from primeslurm.base import durable, files
from primeslurm.base.errors import ClusterError, RunError, UsageError, Violation
from primeslurm.base.paths import is_dir
from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.records.attempt import JobRecord
from primeslurm.run.claims import displaced
from primeslurm.run.directory import CANCEL_NOW, UNFINISHED, Attempt, RunDirectory, was_never_submitted
from primeslurm.run.status.run_status import NO_ANSWER, SUBMITTING, JobQuery, RunStatus, read_status

if TYPE_CHECKING:
    from primeslurm.api.submission import Submitted
    from primeslurm.run.diagnosis.doctor import Diagnosis
    from primeslurm.run.status.summary import Summary

CANCEL_GRACE_S = 45.0
"""From the request to end in good order to scancel, if the head does not react. An agent gives its processes 15 s."""
CHECKPOINT_GRACE_S = 390.0
"""The same if the head waits for a last checkpoint, for which it gives trainers 300 s."""
_POLL_S = 0.5


@dataclass(frozen=True)
class Run:
    """A run, by its directory. It is read anew with every call."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def directory(self) -> RunDirectory:
        """The files of the run."""
        return RunDirectory(self.path)

    def plan(self) -> Plan:
        """Read the plan of the newest attempt. Raises RunError."""
        return self.directory.latest().plan()

    def attempt(self, number: int | None = None) -> Attempt:
        """Find an attempt by its number, or the newest. Raises UsageError, or RunError if there is none."""
        newest = self.directory.latest()
        if number is None:
            return newest
        known = {attempt.number: attempt for attempt in self.directory.attempts()}
        if number not in known:
            why = f"the attempts are {', '.join(map(str, known))}"
            raise UsageError([Violation("--attempt", str(number), why, f"nearest: {newest.number}")])
        return known[number]

    def status(self, *, processes: bool = False, if_silent: OnSilence | None = None) -> RunStatus:
        """Say what the run is doing.

        Args:
            processes: list every single process.
            if_silent: called where Slurm has to be asked and gives no answer, in place of an error. Its job then counts
                as unknown (`silent`).

        Raises:
            RunError: its records are damaged, or of another release.
            ClusterError: Slurm has to be asked and gives no answer.
        """
        with reading(self):
            state, why_silent, why_waiting = queries(self.directory, if_silent)
            return read_status(
                self.directory, state, processes=processes, why_silent=why_silent, why_waiting=why_waiting
            )

    def watch(self, *, poll_s: float = 1.0, if_silent: OnSilence | None = None) -> Iterator[RunStatus]:
        """Yield the status again and again; the last one is of the run that has ended.

        Args:
            poll_s: seconds between two looks.
            if_silent: called when Slurm gives no answer, but for the first time: no job ends of that.

        Raises:
            RunError, ClusterError: as `status`; the latter only for the first look.
        """
        current = self.status()
        yield current
        while current.active:
            time.sleep(poll_s)
            try:
                current = self.status()
            except ClusterError as error:  # its controller is busy, or starts again
                if if_silent is not None:
                    if_silent(error)
                continue
            yield current

    def wait(self, *, timeout_s: float | None = None, poll_s: float = 1.0) -> RunStatus:
        """Wait until the run has ended, and return its last status; `phase` says how it ended.

        Raises:
            TimeoutError: it has not ended after `timeout_s` seconds, and goes on.
            RunError, ClusterError: as `status`; the latter only for the first look.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        status = self.status()
        while status.active:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} is {status.phase} after {timeout_s:g} s")
            time.sleep(poll_s)
            with contextlib.suppress(ClusterError):  # its controller is busy, or starts again: no job ends of that
                status = self.status()
        return status

    def cancel(self, *, now: bool = False, if_silent: OnSilence | None = None) -> bool:
        """Have the trainer write a last checkpoint, then end the run and its job. Returns whether it was not over.

        Args:
            now: do not wait for a last checkpoint. Committed checkpoints stay.
            if_silent: as of `status`.

        Raises:
            UsageError: the directory is a copy of a run, or was moved.
            RunError, ClusterError: as `status`; ClusterError also if sbatch has not said yet which job it submits.
        """
        self._refuse_if_displaced()
        query = job_query(self.directory, if_silent)
        status = self.status(if_silent=if_silent)
        if not status.active and status.phase != "lost":
            return False
        attempt = self.directory.latest()
        durable.write(attempt.cancel_file, CANCEL_NOW if now else "")
        if status.phase not in ("pending", "requeued", "lost"):
            began = time.monotonic()
            while attempt.end() is None and time.monotonic() - began < _cancel_grace_s(attempt):
                time.sleep(_POLL_S)
        if job := self._job_to_end(attempt, query):
            end_job(attempt.plan(), job)
            deadline = time.monotonic() + CANCEL_GRACE_S
            while time.monotonic() < deadline and (query(job) or "").startswith(("RUNNING", "COMPLETING", "PENDING")):
                time.sleep(_POLL_S)
        return True

    def _job_to_end(self, attempt: Attempt, query: JobQuery) -> JobRecord | None:
        """The job of an attempt, with its id once sbatch has answered. None if there is no job."""
        deadline = time.monotonic() + CANCEL_GRACE_S
        while (job := attempt.job()) is not None and not job.job_id:
            state = query(job) or ""
            if not state.startswith((SUBMITTING, NO_ANSWER)):
                return None
            if time.monotonic() > deadline:
                raise ClusterError(f"the job of {self.name} cannot be ended yet: {state}. It ends when it starts")
            time.sleep(_POLL_S)
            settle(self.directory)
        return job

    def resume(self) -> Run:
        """Go on from the last committed step, as a new attempt. Returns the same run.

        Raises:
            UsageError: it has not ended, has done all its steps, or is a copy of a run.
            ClusterError: Slurm refused the job or did not answer.
            RunError: its records are damaged.
        """
        self.start_again()
        return self

    def start_again(self) -> Submitted:
        """Do the same as `resume`; return what was submitted.

        Raises:
            UsageError: the run is active, completed, a copy, or was moved.
            RunError: its directory is damaged.
            ClusterError: Slurm refuses.
        """
        from primeslurm.api import submission

        self._refuse_if_displaced()
        status = self.status()
        if status.active:
            raise UsageError([submission.in_use(self.directory, status.phase)])
        if status.phase == "completed":
            raise UsageError([Violation("RUN", self.name, "is completed: there is nothing to resume")])
        return submission.resume(self.directory, self.directory.attempt(status.attempt))

    def _refuse_if_displaced(self) -> None:
        """Raise UsageError if the plan's processes would use another directory than this one."""
        if problems := displaced(self.path, self.plan()):
            raise UsageError(problems)

    def summary(self) -> Summary:
        """Sum up what the run achieved: reward, versions, staleness, mismatch, restarts. Raises RunError."""
        from primeslurm.run.status.summary import summarise

        with reading(self):
            return summarise(self.directory)

    def diagnose(
        self, attempt: int | None = None, *, max_kl: float | None = None, if_silent: OnSilence | None = None
    ) -> Diagnosis:
        """Name the first failure of an attempt, what followed from it, known causes, and whether the run is valid.

        Args:
            attempt: its number; by default the newest.
            max_kl: largest accepted KL between trainer and engines.
            if_silent: as of `status`.

        Raises:
            UsageError: there is no such attempt.
            RunError, ClusterError: as `status`.
        """
        from primeslurm.run.diagnosis.doctor import diagnose
        from primeslurm.run.diagnosis.validity import MAX_KL

        chosen = self.attempt(attempt)
        with reading(self):
            state, why_silent, why_waiting = queries(self.directory, if_silent)
            limit = MAX_KL if max_kl is None else max_kl
            return diagnose(self.directory, chosen, state, limit, why_silent, why_waiting=why_waiting)

    def report(self, *, if_silent: OnSilence | None = None) -> str:
        """Make one HTML page about the run, with plots. Raises RunError, ClusterError as `status`."""
        from primeslurm.run.report.page import report

        with reading(self):
            return report(self.directory, job_query(self.directory, if_silent), time.time())


def _cancel_grace_s(attempt: Attempt) -> float:
    fleet = attempt.fleet()
    return CHECKPOINT_GRACE_S if fleet is not None and fleet.ending is not None else CANCEL_GRACE_S


def find_run(name: str | Path, runs: str | Path | None = None) -> Run:
    """Find a run by its name or directory.

    Args:
        name: the run's name, or its directory.
        runs: directory of all runs. By default the site file's, then ./runs, where runs without a site file go.

    Raises:
        RunError: there is no such run, and the nearest name is given; or the run is damaged.
    """
    root = runs_directory(runs)
    roots = dict.fromkeys((root, root if runs is not None else Path("runs")))
    for candidate in (*(each / name for each in roots), Path(name)):
        directory = RunDirectory(candidate.absolute())
        if directory.exists():
            return Run(candidate.resolve())
        if is_dir(candidate / "attempts"):
            why = f"; {UNFINISHED}: remove it" if was_never_submitted(directory.path) else ""
            raise RunError(f"{directory.path} is damaged: it has no lock.json{why}")
    nearest = suggestion(str(name), [run.name for each in roots for run in all_runs(each)])
    raise RunError(f"there is no run {name} in {root.absolute()}" + (f" ({nearest})" if nearest else ""))


def all_runs(runs: str | Path | None = None) -> list[Run]:
    """List every run below a directory (by default the site file's, or ./runs), oldest first."""
    root = runs_directory(runs)
    found = [RunDirectory(path) for path in files.listing(root.absolute())]
    known = sorted((run for run in found if run.exists()), key=lambda run: run.created_at)
    return [Run(run.path) for run in known]


@contextlib.contextmanager
def reading(run: Run) -> Iterator[None]:
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

"""`Run`: status, cancel, resume, summary and diagnosis of a submitted run. `find_run` finds runs by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primeslurm.api.jobs import OnNoAnswer, end_job, job_query, queries, record_interrupted_submission
from primeslurm.api.sites import runs_directory
from primeslurm.base import durable, files
from primeslurm.base.errors import ClusterError, RunError, UsageError, Violation
from primeslurm.base.paths import is_dir
from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.records.attempt import JobRecord
from primeslurm.run.attempt_claims import moved_or_copied
from primeslurm.run.directory import CANCEL_NOW, UNFINISHED, Attempt, RunDirectory, was_never_submitted
from primeslurm.run.history import last_trained
from primeslurm.run.status.run_status import NO_ANSWER, SUBMITTING, JobQuery, RunStatus, read_status
from primeslurm.wire.stored import checkpoints

if TYPE_CHECKING:
    from primeslurm.api.submission import Submitted
    from primeslurm.run.diagnosis.doctor import Diagnosis
    from primeslurm.run.rollouts.archive import RolloutArchive
    from primeslurm.run.status.summary import Summary

# Seconds from the cancel request to scancel if the head does not react. An agent gives its processes 15 s.
CANCEL_GRACE_S = 45.0
# The same while the head waits for a last checkpoint, which may take 300 s.
CHECKPOINT_GRACE_S = 390.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Run:
    """A run, identified by its directory. Each method reads the directory again."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.path)

    def plan(self) -> Plan:
        """Return the plan of the newest attempt. Raises RunError."""
        return self.directory.latest().plan()

    def attempt(self, number: int | None = None) -> Attempt:
        """Return an attempt; the newest for None. Raises UsageError if it does not exist, RunError if there is none."""
        newest = self.directory.latest()
        if number is None:
            return newest
        attempts = {attempt.number: attempt for attempt in self.directory.attempts()}
        if number not in attempts:
            why = f"does not exist; the attempts are {', '.join(map(str, attempts))}"
            raise UsageError([Violation("--attempt", str(number), why, f"nearest: {newest.number}")])
        return attempts[number]

    def status(self, *, processes: bool = False, if_silent: OnNoAnswer | None = None) -> RunStatus:
        """Return the status of the run; with `processes`, also the status of each process.

        If Slurm does not answer, `if_silent` is called, and the phase may be `silent`. Without it, ClusterError is
        raised. Raises RunError if records of the run are damaged, or come from another release.
        """
        with reading(self):
            state, find_causes, find_obstacles = queries(self.directory, if_silent)
            return read_status(
                self.directory, state, processes=processes, find_causes=find_causes, find_obstacles=find_obstacles
            )

    def rollouts(self) -> RolloutArchive:
        """Return the rollouts of the run that were kept."""
        from primeslurm.run.rollouts.archive import RolloutArchive  # imports numpy, which other verbs do not need

        return RolloutArchive(self.path)

    def watch(self, *, poll_s: float = 1.0, if_silent: OnNoAnswer | None = None) -> Iterator[RunStatus]:
        """Yield the status every `poll_s` seconds until the run has ended.

        If Slurm does not answer after the first status, `if_silent` is called. Raises as `status`.
        """
        current = self.status()
        yield current
        while current.active:
            time.sleep(poll_s)
            try:
                current = self.status()
            except ClusterError as error:  # slurmctld is busy or restarting
                if if_silent is not None:
                    if_silent(error)
                continue
            yield current

    def wait(self, *, timeout_s: float | None = None, poll_s: float = 1.0) -> RunStatus:
        """Wait until the run has ended, and return its last status; `phase` says how it ended.

        Raises TimeoutError if the run has not ended after `timeout_s` seconds; it continues. Otherwise raises as
        `watch`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        status = self.status()
        while status.active:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} is {status.phase} after {timeout_s:g} s")
            time.sleep(poll_s)
            with contextlib.suppress(ClusterError):  # slurmctld is busy or restarting; jobs continue
                status = self.status()
        return status

    def cancel(self, *, now: bool = False, if_silent: OnNoAnswer | None = None) -> bool:
        """End the run and its job, after a last checkpoint unless `now` is set. Return False if it had already ended.

        Raises UsageError if the directory was copied or moved, ClusterError also if sbatch has not returned the job's
        id yet, and otherwise as `status`.
        """
        self._refuse_if_displaced()
        query = job_query(self.directory, if_silent)
        status = self.status(if_silent=if_silent)
        if not status.active and status.phase != "lost":
            return False
        attempt = self.directory.latest()
        durable.write(attempt.cancel_file, CANCEL_NOW if now else "")
        # If a head runs, it reads this file and ends the attempt. Otherwise only Slurm can end the job.
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
        # A submission may be in progress: wait for sbatch to return the job's id.
        deadline = time.monotonic() + CANCEL_GRACE_S
        while (job := attempt.job()) is not None and not job.job_id:
            state = query(job) or ""
            if not state.startswith((SUBMITTING, NO_ANSWER)):
                return None
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the job of {self.name} cannot be cancelled yet: {state}. It ends as soon as it starts"
                )
            time.sleep(_POLL_S)
            record_interrupted_submission(self.directory)
        return job

    def last_steps(self) -> tuple[int, int]:
        """Return the last step that was trained, and the last one that a checkpoint contains. 0: none."""
        return last_trained(self.directory.latest()), checkpoints.newest(self.path) or 0

    def resume(self) -> Run:
        """Submit a new attempt that continues from the last committed step, and return this run.

        Raises UsageError if the run is active or completed, or its directory was copied or moved; ClusterError if Slurm
        refused the job or did not answer; RunError if records are damaged.
        """
        self.start_again()
        return self

    def start_again(self) -> Submitted:
        from primeslurm.api import submission

        self._refuse_if_displaced()
        status = self.status()
        if status.active:
            raise UsageError([submission.in_use(self.directory, status.phase)])
        if status.phase == "completed":
            raise UsageError([Violation("RUN", self.name, "is completed: there is nothing to resume")])
        return submission.resume(self.directory, self.directory.attempt(status.attempt))

    def _refuse_if_displaced(self) -> None:
        if problems := moved_or_copied(self.path, self.plan()):
            raise UsageError(problems)

    def summary(self) -> Summary:
        """Return rewards, losses, throughput, staleness and failures of the run. Raises RunError."""
        from primeslurm.run.status.summary import summarise

        with reading(self):
            return summarise(self.directory)

    def diagnose(
        self, attempt: int | None = None, *, max_kl: float | None = None, if_silent: OnNoAnswer | None = None
    ) -> Diagnosis:
        """Return the first failure of an attempt (by default the newest), later events, known causes and validity.

        `max_kl` is the largest valid KL between trainer and engines. Raises UsageError if the attempt does not exist;
        RunError and ClusterError as `status`.
        """
        from primeslurm.run.diagnosis.doctor import diagnose
        from primeslurm.run.diagnosis.validity import MAX_KL

        chosen = self.attempt(attempt)
        with reading(self):
            state, find_causes, find_obstacles = queries(self.directory, if_silent)
            limit = MAX_KL if max_kl is None else max_kl
            return diagnose(self.directory, chosen, state, limit, find_causes, find_obstacles=find_obstacles)

    def report(self, *, if_silent: OnNoAnswer | None = None) -> str:
        """Return the dashboard's pages about the run as one HTML file. Raises RunError, ClusterError as `status`."""
        from primeslurm.dashboard.report import report

        with reading(self):
            return report(self.directory, job_query(self.directory, if_silent), time.time())


def _cancel_grace_s(attempt: Attempt) -> float:
    fleet = attempt.fleet()
    return CHECKPOINT_GRACE_S if fleet is not None and fleet.ending is not None else CANCEL_GRACE_S


def find_run(name: str | Path, runs: str | Path | None = None) -> Run:
    """Return a run by its name or directory. By default, the site file's directory of runs and ./runs are searched.

    Raises RunError if the run does not exist (the text has the nearest name), or is damaged.
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
    where = " or ".join(dict.fromkeys(str(each.absolute()) for each in roots))
    raise RunError(f"there is no run {name} in {where}" + (f" ({nearest})" if nearest else ""))


def all_runs(runs: str | Path | None = None) -> list[Run]:
    """Return all runs of a directory (by default the site file's, or ./runs), oldest first."""
    directories = [RunDirectory(path) for path in files.listing(runs_directory(runs).absolute())]
    existing = sorted((run for run in directories if run.exists()), key=lambda run: run.created_at)
    return [Run(run.path) for run in existing]


@contextlib.contextmanager
def reading(run: Run) -> Iterator[None]:
    """Turn errors from damaged records of a run into RunError."""
    # Records are read without full validation, so a damaged file, or one of another release, may raise any error.
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or run.path} cannot be read: {error.strerror}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise RunError(f"{run.path} is damaged, or was made by another release ({why})") from error

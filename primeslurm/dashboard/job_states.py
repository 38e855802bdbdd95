"""Slurm's states of jobs, for many readers: each job is queried rarely, and nobody waits long for Slurm."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass

from primeslurm.base.errors import PrimeslurmError
from primeslurm.records.attempt import JobRecord
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.run_status import ALIVE, NO_ANSWER, SUBMITTING, JobQuery

# Seconds for which the state of a job that has not ended is used.
ACTIVE_S = 20.0
ENDED_S = 600.0
_NOT_ENDED = ("PENDING", "CONFIGURING", "COMPLETING", SUBMITTING, NO_ANSWER, *ALIVE)


@dataclass(frozen=True)
class _Answer:
    state: str | None
    until: float  # time by `clock` until which the state is used


class JobStates:
    """Remembers the states of jobs. One thread asks Slurm."""

    def __init__(
        self, query_of: Callable[[RunDirectory], JobQuery], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._query_of, self._clock = query_of, clock
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, str], _Answer] = {}
        self._open: dict[tuple[str, str], Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, "slurm")

    def of(self, run: RunDirectory, wait_s: float = 0.0) -> JobQuery:
        """Return the query for a run. Without an answer within `wait_s`, it returns the last one, or NO_ANSWER."""

        def state(job: JobRecord) -> str | None:
            key = (str(run.path), job.job_id or job.submission)
            with self._lock:
                answer = self._answers.get(key)
                if answer is not None and answer.until > self._clock():
                    return answer.state
                asked = self._open.get(key)
                if asked is None:
                    asked = self._open[key] = self._thread.submit(self._ask, key, run, job)
            if wait_s and answer is None:
                with contextlib.suppress(TimeoutError):
                    asked.result(wait_s)
            with self._lock:
                answer = self._answers.get(key)
            return NO_ANSWER if answer is None else answer.state

        return state

    def _ask(self, key: tuple[str, str], run: RunDirectory, job: JobRecord) -> None:
        state: str | None = NO_ANSWER
        try:
            with contextlib.suppress(PrimeslurmError, OSError):
                state = self._query_of(run)(job)
        finally:
            ended = state is None or not state.startswith(_NOT_ENDED)
            with self._lock:
                self._answers[key] = _Answer(state, self._clock() + (ENDED_S if ended else ACTIVE_S))
                del self._open[key]

    def close(self) -> None:
        """Stop asking."""
        self._thread.shutdown(wait=False, cancel_futures=True)

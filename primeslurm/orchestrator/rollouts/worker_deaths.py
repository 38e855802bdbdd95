"""Finds tasks that kill environment workers: a pure state machine.

A worker runs many rollouts at once, and all of them die with it. Each task that was in flight becomes a suspect. Its
next rollouts run in an isolated worker, with fewer other suspects after each death, and finally alone. A task is guilty
if it was alone in a worker that died, and that was not the only death: two deaths alone, or one alone and two with
others. A suspect is cleared when one of its rollouts ends, unless a worker has died while it was alone in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.wire.decoding import Count, DamagedError, decode_json

log = logging.getLogger(__name__)

PATH = "rollouts/worker_deaths.json"
SPLIT = 4  # after a death, the suspects are divided among this many workers
DEATHS = 3
DEATHS_ALONE = 2


class Suspect(msgspec.Struct):
    """A task whose rollouts were in flight in workers that died."""

    deaths: Count = 0
    alone: Count = 0  # deaths of workers that ran only this task
    together: Count = 1  # maximum number of tasks, including this one, in its next worker
    # Number of the worker that died last. Another one runs the task next, because a node may kill its workers.
    worker: int = -1

    @property
    def is_guilty(self) -> bool:
        return self.alone >= DEATHS_ALONE or (self.alone > 0 and self.deaths >= DEATHS)


class WorkerDeaths(msgspec.Struct):
    """Suspects and guilty tasks by their key (`Job.task_key`)."""

    suspects: dict[str, Suspect] = {}
    guilty: dict[str, Count] = {}  # number of deaths with each guilty task

    def died(self, jobs: Iterable[Job], worker: int = 0) -> list[Job]:
        """Record the death of a worker with these jobs in flight. Return one job of each task that is now guilty."""
        tasks = {job.task_key: job for job in jobs}
        guilty = []
        for key, job in tasks.items():
            suspect = self.suspects.setdefault(key, Suspect())
            suspect.deaths += 1
            suspect.alone += len(tasks) == 1
            suspect.together = max(1, len(tasks) // SPLIT)
            suspect.worker = worker
            if suspect.is_guilty:
                self.guilty[key] = self.suspects.pop(key).deaths
                guilty.append(job)
        return guilty

    def ended(self, job: Job) -> None:
        """Clear a job's task, because the job ended, unless a worker died while it ran that task alone."""
        suspect = self.suspects.get(job.task_key)
        if suspect is not None and not suspect.alone:
            del self.suspects[job.task_key]

    def reason(self, job: Job) -> str:
        return f"{self.guilty[job.task_key]} environment workers died while they ran it, at last alone"

    def together(self, job: Job) -> int | None:
        """Return how many tasks may run in a suspect's worker, including the suspect. None: the task is no suspect."""
        suspect = self.suspects.get(job.task_key)
        return max(1, suspect.together) if suspect else None

    def last_worker(self, job: Job) -> int:
        """Return the number of the worker that died last with a suspect, or -1 if the task is no suspect."""
        suspect = self.suspects.get(job.task_key)
        return suspect.worker if suspect else -1


def load(run_dir: Path) -> WorkerDeaths:
    """Return what earlier orchestrators of the run have learned."""
    try:
        return decode_json(files.read_bytes(run_dir / PATH), WorkerDeaths)
    except FileNotFoundError:
        return WorkerDeaths()
    except (OSError, DamagedError) as error:
        log.warning("the record of tasks that kill workers is lost: %s", error)
        return WorkerDeaths()


def save_deaths(run_dir: Path, deaths: WorkerDeaths) -> None:
    """Save the record for a restarted orchestrator and later attempts, if the file system accepts it."""
    path = run_dir / PATH
    try:
        files.make_directory(path.parent)
        files.write_atomic(path, msgspec.json.encode(deaths))
    except OSError as error:
        log.warning("a restarted orchestrator will not know which tasks may kill workers: %s", error)


def example_positions(guilty: Mapping[str, int]) -> list[tuple[str, int]]:
    examples = []
    for key in guilty:
        label, _, example = key.partition("@")[0].rpartition("-")
        if example.isdecimal():
            examples.append((label, int(example)))
    return examples

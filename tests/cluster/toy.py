"""An agent that records its calls and signals. It is pickled by reference, so the nodes import this module."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
from submitit.helpers import DelayedSubmission


class ToyAgent:
    """Waits in the first attempt, in which task 0 sends itself SIGUSR2 if `requeue_itself`. Ends at once in later
    attempts. If `held`, task 0 first waits for `let_go`.
    """

    def __init__(self, directory: Path, *, requeue_itself: bool, held: bool = False) -> None:
        self.directory = directory
        self.requeue_itself = requeue_itself
        self.held = held

    @staticmethod
    def let_go(directory: Path) -> None:
        (directory / "go").touch()

    def __call__(self) -> int:
        """Run on every node, and return the task's rank."""
        environment = submitit.JobEnvironment()
        first = self._attempt() == 0
        if first:
            self._follow_signals()
        self._note("start")  # signals may arrive from now on
        if first:
            if self.requeue_itself and environment.global_rank == 0:
                while self.held and not (self.directory / "go").exists():
                    time.sleep(0.1)
                self._wait_for_all_starts(environment.num_tasks)
                os.kill(os.getpid(), signal.SIGUSR2)
            self._wait_for_signals()
        self._note("end")
        return int(environment.global_rank)

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit, only in the first task."""
        self._note("checkpoint")
        return DelayedSubmission(self)

    def _follow_signals(self) -> None:
        forward = signal.getsignal(signal.SIGUSR2)

        def usr2(number: int, frame: FrameType | None) -> None:
            self._note("USR2")
            assert callable(forward)
            forward(number, frame)

        def term(number: int, frame: FrameType | None) -> None:
            self._note("TERM")
            sys.exit(0)

        signal.signal(signal.SIGUSR2, usr2)
        signal.signal(signal.SIGTERM, term)

    def _wait_for_signals(self) -> None:
        # In slices: the kernel may deliver a signal to another thread, which does not wake the main
        # thread, and Python runs handlers only there.
        for _ in range(600):
            time.sleep(0.2)

    def _attempt(self) -> int:
        return sum(note["what"] == "checkpoint" for note in notes(self.directory))

    def _wait_for_all_starts(self, tasks: int) -> None:
        while len({note["rank"] for note in notes(self.directory)}) < tasks:
            time.sleep(0.1)

    def _note(self, what: str) -> None:
        environment = submitit.JobEnvironment()
        names = ("SLURM_RESTART_COUNT", "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME")
        note = {"what": what, "rank": environment.global_rank, "job": environment.job_id, "time": time.time()}
        note |= {name: os.environ.get(name) for name in names}
        with (self.directory / f"notes-{environment.global_rank}.jsonl").open("a") as stream:
            stream.write(json.dumps(note) + "\n")


def notes(directory: Path) -> list[dict[str, Any]]:
    """Return all notes of all tasks, oldest first."""
    lines = [line for path in directory.glob("notes-*.jsonl") for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda note: note["time"])


class EnvironmentNote:
    """Records the environment of every task."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self) -> None:
        rank = submitit.JobEnvironment().global_rank
        (self.directory / f"environment-{rank}.json").write_text(json.dumps(dict(os.environ)))

    @staticmethod
    def read(directory: Path) -> list[dict[str, str]]:
        """Return the environments of all tasks, by rank."""
        return [json.loads(path.read_text()) for path in sorted(directory.glob("environment-*.json"))]

"""Drives whole runs on an embedded cluster through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from primeslurm.api import submission
from primeslurm.api.runs.run import Run
from primeslurm.plan.model import Plan
from primeslurm.recipe import Recipe
from primeslurm.records.events.training import StepTrained
from primeslurm.records.record import Event
from primeslurm.run.directory import RunDirectory, create
from primeslurm.run.history import attempt_events, events, rows
from primeslurm.slurm.submission_signals import signals_held
from tests.support.unmeasured import unmeasured
from tests.support.waiting import StallTimer, bytes_below

Status = dict[str, Any]
E = TypeVar("E", bound=Event)


class Demo:
    """One embedded cluster, and the runs on it."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self.directory, self.runs = root, directory, directory / "runs"
        self.site = directory / "c" / "site.yaml"
        self.slurm_conf = directory / "c" / "slurm.conf"

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run `primeslurm ARGS` at the root of the checkout."""
        argv = [sys.executable, "-m", "primeslurm", *args]
        return subprocess.run(argv, cwd=self.root, env=unmeasured(), capture_output=True, text=True, check=False)

    def up(self) -> None:
        where = ["--name", "e2e", "--directory", str(self.directory / "c"), "--runs", str(self.runs)]
        done = self.command("cluster", "up", *where, "--nodes", "4", "--gpus-per-node", "2")
        assert done.returncode == 0, done.stderr

    def down(self) -> None:
        self.command("cluster", "down", "--name", "e2e", "--directory", str(self.directory / "c"))

    def submit(self, recipe: str, *args: str) -> RunDirectory:
        """Submit a ready recipe, and return at once."""
        words = ("submit", f"recipes/{recipe}", "--site", str(self.site), "--json", *args)
        done = self.command(*words)
        assert done.returncode == 0, done.stderr
        return RunDirectory(Path(json.loads(done.stdout)["directory"]))

    def status(self, run: RunDirectory) -> Status:
        """Return the output of `status --json`."""
        done = self.command("status", str(run.path), "--json", "--processes")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def wait(self, run: RunDirectory, condition: Callable[[Status], object]) -> Status:
        """Poll until the condition holds. Fail with the ends of the logs if the run ends or makes no progress."""
        timer = StallTimer()
        while not condition(status := self._seen(run)):
            progress = bytes_below(run.path, "attempts/*/events/*.jsonl") + bytes_below(run.path, "metrics.jsonl")
            if status["phase"] in ("completed", "failed", "cancelled", "lost") or timer.stalled(progress):
                raise AssertionError(f"{status['phase']}: {status['reason']}\n{tails(run)}")
            time.sleep(2)
        return status

    def _seen(self, run: RunDirectory) -> Status:
        """Read the status in this process: a new Python per poll would take CPU time from the run."""
        return dict(msgspec.to_builtins(Run(run.path).status(processes=True, if_silent=lambda _: None)))

    def finish(self, run: RunDirectory) -> Status:
        """Wait until the run has completed."""
        return self.wait(run, lambda status: status["phase"] == "completed")


def process(status: Status, name: str) -> dict[str, Any]:
    return next(dict(p) for p in status["processes"] if p["name"] == name)


def check_staleness(table: Iterable[Mapping[str, float]], bound: int) -> None:
    """Check that no group is older than the limit, up to the first row in which an example was sampled again.

    A group that is sampled again and becomes too old is trained, with its old tokens as context only. That happens on a
    busy machine.
    """
    for row in table:
        if row["groups/come_again"]:
            return
        assert row["staleness/max"] <= bound, row


def check_learning(run: RunDirectory, steps: int) -> None:
    """Check that an RL run of the demo learns, and that engine and trainer agree."""
    table = rows(run.path)
    assert [row["step"] for row in table] == list(range(1, steps + 1))
    rewards = [row["reward/mean"] for row in table]
    first, last = sum(rewards[:2]) / 2, sum(rewards[-5:]) / 5  # the third step is already much better than the first
    assert last - first >= 0.3, f"reward {first:.3f} -> {last:.3f}: {rewards}"
    check_staleness(table, 2)
    for row in table:
        assert row.get("trainer/mismatch_kl", 0.0) < 1e-3, row
    assert "trainer/mismatch_kl" in table[0], "the first step trains what its own policy sampled"


def trained_steps(run: RunDirectory) -> list[tuple[int, int]]:
    """Return (attempt, step) of every optimizer step, in order of time."""
    trained = []
    for attempt in run.attempts():
        steps = (e for e in attempt_events(attempt) if isinstance(e, StepTrained) and e.process == "trainer-rank-0")
        trained += [(attempt.number, event.step) for event in steps]
    return trained


def events_of(run: RunDirectory, kind: type[E]) -> list[E]:
    """Return all events of one kind, in order of time."""
    return [event for event in events(run) if isinstance(event, kind)]


def tails(run: RunDirectory) -> str:
    """Return the ends of all logs of the newest attempt."""
    logs = sorted((run.latest().path / "logs").rglob("*.log"))
    return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs)


def start_local(recipe: Recipe, plan: Plan, source: Path) -> None:
    """Start a run whose plan a test has changed, with its agents as processes of this machine."""
    with signals_held(plan.run) as held:
        submission._start(create(recipe, plan, source, submission._intent(plan, None)), plan, "", held)

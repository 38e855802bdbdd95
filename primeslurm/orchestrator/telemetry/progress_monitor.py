"""Progress of a run as the orchestrator sees it: its state once a second, load of engines, failures, and stalls."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec

from primeslurm.base.errors import PrimeslurmError
from primeslurm.orchestrator.rollouts.job_protocol import Job, JobFailure
from primeslurm.orchestrator.telemetry.engine_load import ENGINE, LastSamples, LoadWindow, Sample, rounded, scrape
from primeslurm.orchestrator.telemetry.rollout_failures import RolloutFailures, headline
from primeslurm.recipe import Recipe
from primeslurm.records.events.training import EnvironmentFails, RolloutFailed, Stalled, StepReported, TaskGivenUp
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import Row
from primeslurm.records.state import FailedRollouts, Load, OrchestratorState
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.transport.http import internal_client

STATE_INTERVAL_S = 1.0
FAILED_BATCHES = 4  # if rollouts for this many batches fail or are rejected in a row, without a success, the run ends
SCRAPE_INTERVAL_S = 5.0
# Maximum rate. A thousand engines are scraped every 20 s, so that this stays a small part of the process's work.
SCRAPES_PER_S = 50.0
_ROW_LOADS = (  # values of a role's load that are metrics of each step
    *("running_mean", "waiting_mean", "kv_usage_mean", "busy_mean", "generated_per_s", "computed_per_s"),
    *("preemptions_per_s", "prefix_hit_rate", "external_hit_rate", "acceptance_rate"),
)


class StallError(PrimeslurmError):
    """The run has made no progress for too long. The message names the suspect."""

    exit_code = exit_codes.STALLED


class UnrecoverableError(PrimeslurmError):
    """All rollouts of an environment fail, and another attempt would not change that."""

    exit_code = exit_codes.UNRECOVERABLE


class ProgressMonitor:
    """Counts events and decides when the run has stalled.

    `resumed`: whether the run has trained a step before, so that its environments are known to work.
    """

    def __init__(
        self,
        recipe: Recipe,
        journal: Journal,
        engines: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
        *,
        resumed: bool = False,
        looked: Callable[[Mapping[str, Sample]], None] = lambda samples: None,
    ) -> None:
        self._stall_timeout_s = recipe.orchestrator.stall_s
        self._max_failures = FAILED_BATCHES * recipe.orchestrator.batch_size
        workers = {each.label: each.workers for each in recipe.environments}
        self._failures = RolloutFailures(self._max_failures, workers, hopeful=workers if resumed else ())
        self._rejected: Counter[str] = Counter()  # rejected groups by reason, since a group was kept
        self._rejected_rollouts = 0
        self._rejecting_since = 0.0
        self._tp = recipe.inference.parallel.tp
        self._journal = journal
        self._engines = engines
        self._looked = looked
        self._clock = clock
        self._window = LoadWindow()
        self._last_samples = LastSamples()
        self._roles: dict[str, Load] = {}
        self._replicas: dict[str, dict[str, Load]] = {}
        self._tokens = 0
        self._tokens_per_s = 0.0
        self._moved_at: float | None = None  # time of the last progress; None before the first policy
        self._row_at = clock()
        self._reported_at = 0.0
        self._wanted_at: tuple[int, float] | None = None
        self._update_s = 0.0
        self._counts_before: Counter[str] = Counter()
        self._given = 0
        self._done = 0
        self._last_row: Row = {}

    @property
    def trained_step(self) -> int | None:
        """Return the step that the trainer has the batch of and has not reported as done."""
        return self._given if self._given > self._done else None

    def moved(self) -> None:
        """Record progress of another kind than the following."""
        self._moved_at = self._clock()

    def engines_seen(self, samples: Mapping[str, Sample], silent: Collection[str] = ()) -> None:
        """Record samples of engines by name. While engines compute, the run makes progress.

        `silent`: engines that accepted the connection and did not answer. They are busy, and keep their last samples.
        """
        before = self._window.tokens
        self._window.add(self._clock(), samples)
        if self._window.tokens > before:
            self._moved_at = self._clock()
        self._roles, self._replicas = self._window.by_role(), self._window.by_replica()
        self._looked(self._last_samples.fill(self._clock(), samples, silent))

    def rollout_finished(self, sequences: tuple[Rollout, ...]) -> None:
        self._tokens += sum(int(sequence.mask.sum()) for sequence in sequences)
        self._moved_at = self._clock()
        for first in sequences[:1]:
            self._failures.finished(first.info.id, first.info.environment, self._moved_at)

    def rollout_started(self, job: Job) -> None:
        self._failures.started(job, self._clock())

    def rollout_failed(self, job: str, failure: JobFailure) -> None:
        """Record a failed rollout, which is no progress."""
        environment = self._failures.failed(job, failure.error, self._clock(), failure.cause)
        self._journal.write(RolloutFailed(job, headline(failure.error), environment))

    def task_given_up(self, environment: str, example: int, reason: str, task: int | None, *, kills: bool) -> None:
        self._failures.given_up(environment, self._clock(), killer=reason if kills else "")
        self._journal.write(TaskGivenUp(environment, example, reason, task))

    @property
    def failures(self) -> dict[str, FailedRollouts]:
        return self._failures.report

    def worker_failed(self, environment: str, worker: int, error: str) -> None:
        self._failures.not_started(environment, worker, error, self._clock())

    def group_kept(self) -> None:
        self._rejected.clear()
        self._rejected_rollouts = 0

    def group_rejected(self, reason: str, rollouts: int) -> None:
        if not self._rejected:
            self._rejecting_since = self._clock()
        self._rejected[reason] += 1
        self._rejected_rollouts += rollouts

    def policy_wanted(self, version: int) -> None:
        self._wanted_at = (version, self._clock())

    def policy_current(self, version: int) -> None:
        self._moved_at = self._clock()
        if self._wanted_at is not None and self._wanted_at[0] == version:
            self._update_s = self._moved_at - self._wanted_at[1]

    def batch_given(self, step: int) -> None:
        self._given = step

    def step_done(self, step: int, row: Row) -> None:
        self._done = step
        self._last_row = row
        self._journal.write(StepReported(step, row.get("reward/mean")))

    def step_metrics(self, counts: Counter[str], queues: Mapping[str, int], version: int | None) -> Row:
        """Return the metrics since the last row. `counts`: the dispatcher's counters since the start of the process."""
        now = self._clock()
        self._tokens_per_s = self._tokens / max(now - self._row_at, 1e-6)
        total, counts = counts.copy(), counts - self._counts_before
        self._counts_before = total
        row = {
            "throughput/tokens_per_s": self._tokens_per_s,
            "throughput/step_seconds": now - self._row_at,
            "policy/version": float(-1 if version is None else version),
            "policy/update_seconds": self._update_s,
            **{f"queue/{name}": float(length) for name, length in queues.items()},
            "rollouts/dropped_stale": float(counts["rollouts_dropped_stale"]),
            "rollouts/carried": float(counts["rollouts_carried"]),
            "groups/completed_early": float(counts["groups_completed_early"]),
            "groups/come_again": float(counts["examples_returned"]),
            "rollouts/failed": float(counts["failed"]),
            "rollouts/lost": float(counts["lost"]),
        }
        for name in counts:
            if name.startswith("groups_rejected_"):
                row[name.replace("_", "/", 1)] = float(counts[name])
        for role, load in self._roles.items():
            values = {name: getattr(load, name) for name in _ROW_LOADS}
            row |= {f"engines/{role}/{name}": value for name, value in values.items() if value is not None}
            row[f"engines/{role}/idle_fraction"] = 1 - load.busy_mean
            row[f"engines/{role}/generated_per_s_per_gpu"] = load.generated_per_s / (load.engines * self._tp)
        for role, engines in Counter(match["role"] for match in map(ENGINE.match, self._engines()) if match).items():
            row[f"engines/{role}/gpu_hours"] = engines * self._tp * (now - self._row_at) / 3600
        self._tokens = 0
        self._row_at = now
        return row

    def report(self, state: Callable[[], OrchestratorState]) -> None:
        if self._clock() - self._reported_at >= STATE_INTERVAL_S:
            self._reported_at = self._clock()
            self.write_state(state())

    def write_state(self, state: OrchestratorState) -> None:
        """Write the state file, with the values that are measured here."""
        self._journal.state(
            msgspec.structs.replace(
                state,
                moved=self._moved_at or 0.0,
                reward=self._last_row.get("reward/mean"),
                staleness=self._last_row.get("staleness/max"),
                tokens_per_s=self._tokens_per_s,
                roles=rounded(self._roles),
                replicas={replica: rounded(roles) for replica, roles in self._replicas.items()},
            )
        )

    def check_engines(self, useless: str) -> None:
        """Raise StallError if engines cannot be used. `useless`: why they cannot; empty if they can."""
        if useless:
            self._journal.write(Stalled("engines", useless))
            raise StallError(useless)

    def check_stall(self, suspect: Callable[[], str], runs: Callable[[str], bool], served: Collection[str]) -> None:
        """End a run without progress. Time counts from the first policy.

        Raise UnrecoverableError if an environment has always failed in the same way, and StallError if no token,
        rollout or policy came for too long, all rollouts fail, or all groups are rejected.
        """
        if (hopeless := self._failures.hopeless(self._clock(), runs, served)) is not None:
            self._journal.write(EnvironmentFails(hopeless.environment, hopeless.error, hopeless.failures))
            raise (StallError if hopeless.may_pass else UnrecoverableError)(str(hopeless))
        environment, failures, error = self._failures.streak()
        if failures >= self._max_failures:
            self._journal.write(EnvironmentFails(environment, error, failures))
            raise StallError(f"environment {environment}: {failures} rollouts failed in a row; the last: {error}")
        self._check_rejected()
        if self._moved_at is None or self._clock() - self._moved_at < self._stall_timeout_s:
            return
        name = suspect()
        nothing = "no token was generated, no rollout finished and no policy arrived"
        text = f"{nothing} for {self._stall_timeout_s} s; {self._engine_load()}"
        self._journal.write(Stalled(name, text, self._stall_timeout_s))
        raise StallError(f"{text}; suspect: {name}")

    def _engine_load(self) -> str:
        if not self._roles:
            return "no engine reports its load"
        running = sum(load.running for load in self._roles.values())
        waiting = sum(load.waiting for load in self._roles.values())
        if running + waiting == 0:
            return "engines have no requests"
        return f"engines have {running:.0f} running and {waiting:.0f} waiting requests"

    def _check_rejected(self) -> None:
        groups, seconds = self._rejected.total(), self._stall_timeout_s
        if self._rejected_rollouts < self._max_failures or self._clock() - self._rejecting_since < seconds:
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self._rejected.most_common())
        text = f"{groups} groups in a row were rejected ({reasons}), none was kept for {seconds} s: no batch can form"
        self._journal.write(Stalled("algorithm", text, seconds))
        raise StallError(text)

    async def scrape(self) -> None:
        # Connections are not kept, because uvicorn closes idle ones before the next scrape.
        async with internal_client(SCRAPE_INTERVAL_S, keep=0) as client:
            while True:
                engines = self._engines()
                self.engines_seen(*await scrape(client, engines))
                await asyncio.sleep(max(SCRAPE_INTERVAL_S, len(engines) / SCRAPES_PER_S))

"""The orchestrator of `task: eval`: it runs one evaluation on the weights that the engines loaded at their start."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec

from primeslurm.base.errors import PrimeslurmError
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.evaluation.evaluator import Evaluator
from primeslurm.orchestrator.rollouts import worker_deaths, worker_pool
from primeslurm.orchestrator.rollouts.job_protocol import Job, JobFailure
from primeslurm.orchestrator.telemetry.progress_monitor import FAILED_BATCHES, StallError, UnrecoverableError
from primeslurm.orchestrator.telemetry.rollout_failures import RolloutFailures
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.orchestrator.weight_updates.weight_update_loop import weight_update_loop
from primeslurm.recipe import Recipe
from primeslurm.records.attempt import require_newest
from primeslurm.records.events.training import (
    EnvironmentFails,
    OrchestratorDone,
    OrchestratorUp,
    ReplicaLost,
    Stalled,
)
from primeslurm.records.heartbeats import liveness
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import MetricsLog
from primeslurm.records.state import OrchestratorState

TICK_S = 0.5
# Policy version of the weights that the engines loaded.
VERSION = 0


class EvaluationOrchestrator:
    """The orchestrator of one attempt. `await run()` returns once the results are on disk."""

    def __init__(
        self, recipe: Recipe, arguments: OrchestratorArguments, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recipe = recipe
        self._clock = clock
        self._arguments = arguments
        self._journal = Journal(arguments.attempt_dir, "orchestrator")
        require_newest(arguments.run_dir, arguments.attempt)
        self._journal.note_storage_faults()
        self._metrics = MetricsLog(arguments.run_dir, VERSION, **recipe.metrics_options())
        incarnation = uuid.uuid4().hex[:6]
        self._recorder = RolloutRecorder(arguments.run_dir, arguments.attempt, recipe.monitor.rollouts, lambda: VERSION)
        self._evaluator = Evaluator(
            recipe, arguments, VERSION, incarnation, self._journal, self._metrics, self._recorder
        )
        self._deaths = worker_deaths.load(arguments.run_dir)
        self._workers = worker_pool.WorkerPool(
            arguments.env_bind, max_per_node=recipe.deployment.max_rollouts_per_node, deaths=self._deaths
        )
        workers = {each.label: each.workers for each in recipe.evaluation_environments}
        max_failures = FAILED_BATCHES * recipe.orchestrator.batch_size
        self._failures = RolloutFailures(max_failures, workers, hopeful=self._evaluator.working)
        self._policy = weight_update_loop(recipe, arguments, self._journal)
        self._cancelled: list[str] = []
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Run until the results are on disk. Raise PrimeslurmError if an environment or all replicas fail."""
        self._journal.write(OrchestratorUp(VERSION))
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(each) for each in (self._collect(), self._policy.run())]
                await self._policy.want(PolicyVersion(VERSION, self._recipe.model.path))
                while not self._evaluator.settled(VERSION):
                    await self._step()
                self._journal.state(self._state())
                for task in background:  # they never end by themselves
                    task.cancel()
        finally:
            self._recorder.close()
            self._metrics.close()
        self._journal.write(OrchestratorDone(VERSION))

    async def _step(self) -> None:
        liveness().enter("event loop")
        self._follow_addresses()
        for event in self._workers.expire():
            self._handle(event)
        self._check()
        version = self._policy.current_version  # None until the engines have loaded their weights
        cancelled, self._cancelled = self._cancelled, []
        await self._workers.cancel(cancelled)
        if version is not None:
            await self._workers.cancel(self._evaluator.follow(version, self._workers.tasks))
            while job := self._evaluator.next_job(self._workers.available, version):
                # A task that has killed its workers, maybe before a restart, would kill the next worker, too.
                if job.task_key in self._deaths.guilty:
                    self._evaluator.give_up_task(job, self._deaths.reason(job))
                    continue
                self._failures.started(job, self._clock())
                await self._workers.send(job)
        self._journal.state(self._state())
        # Addresses and timeouts change without an event, so the loop also runs once per tick.
        try:
            async with asyncio.timeout(TICK_S):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _check(self) -> None:
        """Raise an error if the evaluation cannot succeed. The head reads the reason from the last state."""
        if self._policy.useless:
            self._journal.write(Stalled("engines", self._policy.useless))
            self._journal.state(msgspec.structs.replace(self._state(), failure=self._policy.useless))
            raise StallError(self._policy.useless)
        hopeless = self._failures.hopeless(self._clock(), self._evaluator.runs, self._workers.environments)
        if hopeless is None:
            return
        self._journal.write(EnvironmentFails(hopeless.environment, hopeless.error, hopeless.failures))
        self._journal.state(msgspec.structs.replace(self._state(), failure=str(hopeless)))
        raise UnrecoverableError(str(hopeless))

    def _follow_addresses(self) -> None:
        """Follow the addresses of restarted engines, and drop replicas that the head has given up."""
        self._policy.follow(self._arguments.engine_urls())
        for router in self._arguments.addresses.lost.intersection(self._evaluator.routers):
            jobs = self._evaluator.drop_router(router)
            self._journal.write(ReplicaLost(router, len(jobs)))
            if not self._evaluator.routers:
                raise PrimeslurmError("all inference replicas were given up")

    async def _collect(self) -> None:
        try:
            while True:
                for event in await self._workers.receive():
                    self._handle(event)
        finally:
            self._workers.close()

    def _handle(self, event: worker_pool.WorkerEvent) -> None:
        # Workers may still report jobs that were cancelled. The guards ignore those.
        match event:
            case worker_pool.RolloutEnded(job, outcome) if self._evaluator.runs(job):
                self._evaluator.result(job, outcome)
                if isinstance(outcome, JobFailure):
                    self._failures.failed(job, outcome.error, self._clock(), outcome.cause)
                else:
                    self._failures.finished(job, outcome[0].info.environment, self._clock())
                self._wake.set()
            case worker_pool.JobLost(job) if self._evaluator.runs(job):
                self._evaluator.lost(job)
            case worker_pool.WorkerUnusable(environment, worker, error):
                self._evaluator.unusable(environment, worker, error)
                self._failures.not_started(environment, worker, error, self._clock())
                self._wake.set()
            case worker_pool.WorkerDied(environment, _, guilty):
                self._give_up_tasks(environment, guilty)
            case worker_pool.EnginesAnswered(answers):
                self._policy.take_answers(answers)

    def _give_up_tasks(self, environment: str, guilty: Sequence[Job]) -> None:
        worker_deaths.save_deaths(self._arguments.run_dir, self._deaths)
        for job in guilty:
            reason = self._deaths.reason(job)
            self._failures.given_up(environment, self._clock(), killer=reason)
            self._cancelled += self._evaluator.give_up_task(job, reason)
        self._wake.set()

    def _state(self) -> OrchestratorState:
        return OrchestratorState(
            moved=self._clock(),  # the evaluation has timeouts of its own, so the head must not detect a stall
            version=self._policy.current_version,
            engines=self._policy.pool.report(),
            failures=self._failures.report,
            environments=sorted(self._workers.environments),
            evaluation=self._evaluator.progress,
        )

"""Stage 1, dispatch: sends jobs to environment workers while replicas have free slots."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from primeslurm.orchestrator.dispatch.concurrency import Concurrency
from primeslurm.orchestrator.pipeline.context import PipelineContext
from primeslurm.orchestrator.rollouts.worker_pool import WorkerPool
from primeslurm.orchestrator.telemetry.engine_load import Sample
from primeslurm.recipe.sections.orchestrator import AnyEnvironment
from primeslurm.records.events.training import ReplicaLost
from primeslurm.records.state import ReplicaLoad

# After a restart of this process, the longest wait for workers to report the jobs they run
ADOPTION_S = 30.0


class DispatchStage:
    """Input: free slots. Output: jobs, sent to workers.

    Args:
        is_restarted: This process continues the attempt of one that was killed. Workers may still run its jobs.
        is_blocked: Non-empty while groups wait in memory for a full disk: no rollout starts then.
    """

    def __init__(
        self, context: PipelineContext, workers: WorkerPool, *, is_restarted: bool, is_blocked: Mapping[str, object]
    ) -> None:
        self._context, self._workers = context, workers
        self._dispatcher, self._evaluator, self._feedback = context.dispatcher, context.evaluator, context.feedback
        self._is_blocked = is_blocked
        self._awaits_training = self._awaits_evaluation = is_restarted
        self._adoption_deadline: float | None = None
        self._concurrency: Concurrency | None = None
        if context.recipe.orchestrator.concurrency == "adaptive":
            arguments = context.arguments
            self._concurrency = Concurrency(arguments.routers, arguments.engines, context.recipe.max_inflight)
            # Dispatch starts before the first look at the engines.
            self._dispatcher.replicas.limits = self._concurrency.slots

    async def run_once(self) -> None:
        """Cancel what later stages gave up, then start as many jobs as possible."""
        await self.cancel()
        # Evaluation first: its bound is its own, while training takes all the slots that workers have left.
        await self._dispatch_evaluation()
        while self._may_dispatch() and (job := self._dispatcher.next_job(self._workers.available)):
            self._context.monitor.rollout_started(job)
            await self._workers.send(job)

    async def cancel(self) -> None:
        await self._workers.cancel(self._feedback.take_cancelled())

    def drop_lost_replicas(self) -> None:
        """Move the rollouts of replicas that the head gave up to the others."""
        for router in self._context.arguments.addresses.lost.intersection(self._dispatcher.replicas.routers):
            jobs = self._dispatcher.drop_router(router)
            if self._concurrency is not None:
                self._concurrency.drop(router)
            jobs += self._evaluator.drop_router(router)
            self._feedback.cancel(jobs)
            self._context.journal.write(ReplicaLost(router, len(jobs)))

    def observe_engines(self, samples: Mapping[str, Sample]) -> None:
        """Update the limit of each replica from its engines' metrics."""
        if self._concurrency is not None:
            replicas = self._dispatcher.replicas
            self._concurrency.observe(samples, replicas.load, replicas.ended, self._evaluator.load)
            replicas.limits = self._concurrency.slots
            self._feedback.wake()

    @property
    def replica_loads(self) -> dict[str, ReplicaLoad]:
        """Return load and limit by replica; empty unless concurrency is adaptive."""
        return self._concurrency.report if self._concurrency is not None else {}

    async def _dispatch_evaluation(self) -> None:
        version = self._dispatcher.version
        await self._workers.cancel(self._evaluator.follow(version, self._workers.tasks))
        evaluation = self._context.recipe.evaluation
        if evaluation is not None and self._awaits_evaluation:
            self._awaits_evaluation = not self._have_reported(evaluation.environments)
        while not self._awaits_evaluation and (job := self._evaluator.next_job(self._workers.available, version)):
            if job.task_key in self._context.deaths.guilty:
                self._evaluator.give_up_task(job, self._context.deaths.reason(job))
                continue
            await self._workers.send(job)

    def _may_dispatch(self) -> bool:
        # After a restart, workers first report what they run. Otherwise the same rollouts would start again.
        self._awaits_training = self._awaits_training and not self._have_reported(self._context.recipe.environments)
        return not self._awaits_training and not self._is_blocked

    def _have_reported(self, environments: Sequence[AnyEnvironment]) -> bool:
        """Tell whether all workers of some environments have reported their jobs, or had the time to."""
        if self._adoption_deadline is None:
            self._adoption_deadline = time.monotonic() + ADOPTION_S
        workers = sum(environment.workers for environment in environments)
        is_settled = self._workers.count_settled({environment.label for environment in environments}) >= workers
        return is_settled or time.monotonic() >= self._adoption_deadline

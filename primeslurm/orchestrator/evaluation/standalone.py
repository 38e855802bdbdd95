"""The orchestrator of task eval: engines keep the weights that they loaded, and one evaluation runs on them."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid

from primeslurm.errors import PrimeslurmError
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.evaluation.evaluator import Evaluator
from primeslurm.orchestrator.rollouts.worker_pool import WorkerPool
from primeslurm.orchestrator.weight_transfer.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.weight_transfer.policy_loop import PolicyLoop
from primeslurm.recipe import Recipe
from primeslurm.records.beats import pulse
from primeslurm.records.events.training import OrchestratorDone, OrchestratorUp, ReplicaLost
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import MetricsLog
from primeslurm.records.state import OrchestratorState
from primeslurm.wire.batches.rollouts import Rollout

TICK_S = 0.5
VERSION = 0
"""Of the weights that engines loaded."""


class EvaluationServer:
    """One attempt's orchestrator. `await run()` returns when the results are on disk."""

    def __init__(self, recipe: Recipe, arguments: OrchestratorArguments) -> None:
        self._recipe = recipe
        self._arguments = arguments
        self._journal = Journal(arguments.attempt_dir, "orchestrator")
        self._metrics = MetricsLog(arguments.run_dir, VERSION, **recipe.metrics_options())
        incarnation = uuid.uuid4().hex[:6]
        self._evaluator = Evaluator(recipe, arguments, VERSION, incarnation, self._journal, self._metrics)
        most = recipe.deployment.max_rollouts_per_node
        self._workers = WorkerPool(
            arguments.env_bind, self._on_result, self._on_lost, self._evaluator.unusable, max_per_node=most
        )
        url = arguments.addresses.url
        clients = {
            name: EngineClient(
                functools.partial(url, name), recipe.model.path, trains_encoder=recipe.model.trains_encoder
            )
            for name in arguments.engines
        }
        urls = {name: url(name) for name in arguments.engines}
        self._policy = PolicyLoop(clients, self._journal, recipe.weights.timeout_s, urls=urls)
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Run until the results are on disk.

        Raises:
            PrimeslurmError: there is nothing to evaluate on any more.
        """
        self._journal.write(OrchestratorUp(VERSION))
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(part) for part in (self._workers.serve(), self._policy.run())]
                await self._policy.want(PolicyVersion(VERSION, self._recipe.model.path))
                while not self._evaluator.settled(VERSION):
                    await self._step()
                self._journal.state(self._state())
                for task in background:
                    task.cancel()
        finally:
            self._metrics.close()
        self._journal.write(OrchestratorDone(VERSION))

    async def _step(self) -> None:
        pulse().enter("event loop")
        self._follow_addresses()
        self._workers.expire()
        version = self._policy.current_version
        if version is not None:
            await self._workers.cancel(self._evaluator.follow(version, self._workers.tasks))
            while job := self._evaluator.next_job(self._workers.available, version):
                await self._workers.send(job)
        self._journal.state(self._state())
        try:
            async with asyncio.timeout(TICK_S):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _follow_addresses(self) -> None:
        """Do without what the head gave up, and wait no longer for answers from where something was."""
        self._policy.follow(self._arguments.engine_urls())
        for router in self._arguments.addresses.lost.intersection(self._evaluator.routers):
            jobs = self._evaluator.drop_router(router)
            self._journal.write(ReplicaLost(router, len(jobs)))
            if not self._evaluator.routers:
                raise PrimeslurmError("every inference replica was given up")

    def _on_result(self, job: str, outcome: tuple[Rollout, ...] | str) -> None:
        if self._evaluator.runs(job):
            self._evaluator.result(job, outcome)
            self._wake.set()

    def _on_lost(self, job: str) -> None:
        if self._evaluator.runs(job):
            self._evaluator.lost(job)

    def _state(self) -> OrchestratorState:
        return OrchestratorState(
            moved=time.monotonic(),  # it ends by itself what stands still
            version=self._policy.current_version,
            engines=self._policy.pool.report(),
            environments=sorted(self._workers.environments),
            evaluation=self._evaluator.progress,
        )

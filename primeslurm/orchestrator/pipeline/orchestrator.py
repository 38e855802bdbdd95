"""The orchestrator: a pipeline from rollouts to the trainer's batches. This module wires its stages in order.

    dispatch -> (workers) -> collect -> finalize -> batch -> serve

- dispatch: `DispatchStage` sends jobs to environment workers while replicas have free slots.
- collect: `CollectStage` takes the workers' reports, and returns a group when its last rollout arrives.
- finalize: `GroupFinalizer` filters a complete group and writes it to disk. With a teacher, `Scoring` adds its
  log-probabilities, and the group is written again.
- batch: `BatchStage` forms a step's batch from finalized groups and records it.
- serve: `TrainerService` answers the trainer.

Later stages reach the first one only through `Feedback`: jobs to cancel, and a wake-up. The weight update loop, the
evaluation and the engines' metrics run beside the pipeline. All state changes happen on one event loop. Whatever the
trainer is told is on disk first, so a killed orchestrator continues with the same answers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping

import msgspec

from primeslurm.base.errors import PrimeslurmError
from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.batching.group_filter import GroupFilter
from primeslurm.orchestrator.batching.shard_files import ShardFiles
from primeslurm.orchestrator.dispatch import Dispatcher
from primeslurm.orchestrator.dispatch.curricula import OUTCOMES, Curricula
from primeslurm.orchestrator.evaluation.evaluator import Evaluator
from primeslurm.orchestrator.pipeline.batch import BatchStage
from primeslurm.orchestrator.pipeline.collect import CollectStage
from primeslurm.orchestrator.pipeline.context import PipelineContext
from primeslurm.orchestrator.pipeline.dispatch import DispatchStage
from primeslurm.orchestrator.pipeline.finalize import CompleteGroup, GroupFinalizer
from primeslurm.orchestrator.pipeline.progress import PROGRESS, ProgressFile, recover, restore
from primeslurm.orchestrator.pipeline.serve import TrainerService
from primeslurm.orchestrator.rollouts import worker_deaths
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.orchestrator.rollouts.worker_pool import WorkerEvent, WorkerPool
from primeslurm.orchestrator.teacher import scoring_of
from primeslurm.orchestrator.telemetry.progress_monitor import ProgressMonitor
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.orchestrator.weight_updates.sessions import TransferSessions
from primeslurm.orchestrator.weight_updates.weight_update_loop import weight_update_loop
from primeslurm.recipe import Recipe
from primeslurm.records.attempt import require_newest
from primeslurm.records.events.training import OrchestratorDone, OrchestratorUp
from primeslurm.records.heartbeats import liveness
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import MetricsLog
from primeslurm.records.state import EngineRecord, OrchestratorState
from primeslurm.wire.link.orchestrator_link import OrchestratorLink

# Seconds between two checks of workers, stalls and the state file
TICK_S = 0.2
# Bytes of complete groups after which no other group is written with them
WRITTEN_TOGETHER = 4 << 20
# Longest time for the work after the last step, such as uploading metrics
END_S = 1800.0
# Seconds for which the trainer's last requests are still answered after the run is complete
LINGER_S = 3.0


class OrchestratorPipeline:
    """One attempt's orchestrator. `await run()` returns when the run is complete."""

    def __init__(self, recipe: Recipe, arguments: OrchestratorArguments, linger_s: float = LINGER_S) -> None:
        self._recipe, self._arguments, self._linger_s = recipe, arguments, linger_s
        self._journal = Journal(arguments.attempt_dir, "orchestrator")
        self._journal.note_storage_faults()
        is_restarted = self._journal.has_begun
        require_newest(arguments.run_dir, arguments.attempt)

        # State that an earlier process left on disk.
        progress = restore(arguments.run_dir, arguments.attempt)
        spool = Spool(arguments.run_dir / "rollouts")
        self._curricula = Curricula(recipe, arguments.run_dir / OUTCOMES, progress.outcomes, progress.fresh)
        self._curricula.set_tasks(progress.tasks)
        deaths = worker_deaths.load(arguments.run_dir)
        algorithm = algorithms.from_recipe(recipe)
        self._recorder = RolloutRecorder(
            arguments.run_dir, arguments.attempt, recipe.monitor.rollouts, lambda: self.dispatcher.step
        )
        self._batches = Batches(recipe, algorithm, spool.on_disk, progress.committed, self._recorder)
        guilty = worker_deaths.example_positions(deaths.guilty)
        self.dispatcher, self._outdated_groups = recover(
            recipe, arguments, progress, spool, self._batches, self._curricula, guilty
        )
        self.progress = ProgressFile(arguments.run_dir / PROGRESS, progress, self.dispatcher, self._curricula)

        # Tasks beside the pipeline.
        self._metrics = MetricsLog(arguments.run_dir, progress.done_step, **recipe.metrics_options())
        newest, incarnation = progress.newest_version, self.dispatcher.incarnation
        self._evaluator = Evaluator(
            recipe, arguments, newest, incarnation, self._journal, self._metrics, self._recorder
        )
        sessions = TransferSessions(recipe.inference.parallel.tp, recipe.weights.load_s)
        self._policy = weight_update_loop(
            recipe,
            arguments,
            self._journal,
            sessions=sessions,
            before_update=self._before_update,
            after_update=self._after_update,
        )
        self._monitor = ProgressMonitor(
            recipe,
            self._journal,
            arguments.engine_urls,
            resumed=progress.done_step > 0,
            looked=lambda samples: self._dispatch.observe_engines(samples),
        )

        # The stages. `complete` connects collect with finalize.
        self.complete: asyncio.Queue[CompleteGroup] = asyncio.Queue()
        context = PipelineContext(
            recipe=recipe,
            arguments=arguments,
            dispatcher=self.dispatcher,
            evaluator=self._evaluator,
            policy=self._policy,
            deaths=deaths,
            monitor=self._monitor,
            journal=self._journal,
            recorder=self._recorder,
        )
        self._feedback = context.feedback
        self.collect = CollectStage(context)
        self.workers = WorkerPool(
            arguments.env_bind, self.collect, max_per_node=recipe.deployment.max_rollouts_per_node, deaths=deaths
        )
        self._dispatch = DispatchStage(context, self.workers, is_restarted=is_restarted, is_blocked=spool.waiting)
        self._filter = GroupFilter(recipe, algorithm, self._curricula, self._journal)
        self.finalizer = GroupFinalizer(self._filter, spool, self._recorder)
        self.batch = BatchStage(context, algorithm, self._batches, self.progress, spool, self.finalizer, self.complete)
        self.batch.scoring = self._scoring = scoring_of(
            recipe,
            arguments,
            self.dispatcher.unscored.values(),
            on_scored=lambda group: self.complete.put_nowait(CompleteGroup(group, is_scored=True)),
            on_damaged=self.batch.give_up_damaged,
        )
        self._files: ShardFiles | None = None
        if recipe.orchestrator.rollout_transport == "filesystem":
            self._files = ShardFiles(arguments.run_dir, arguments.attempt, self._batches, progress.committed)
        self.service = TrainerService(
            context,
            batch=self.batch,
            batches=self._batches,
            files=self._files,
            finalizer=self.finalizer,
            group_filter=self._filter,
            progress=self.progress,
            sessions=sessions,
            metrics=self._metrics,
        )
        self.link = OrchestratorLink(arguments.bind, self.service.handle)
        self._final_policy_at: float | None = None
        self._next_tick = -math.inf

    async def run(self) -> None:
        """Run until the last step is committed and its policy is on the engines. Raise PrimeslurmError if it stalls."""
        self._journal.write(OrchestratorUp(self.progress.now.next_step, len(self.dispatcher.ready)))
        try:
            async with asyncio.TaskGroup() as group:
                parts = [self.link.serve(), self._policy.run(), self._monitor.scrape()]
                parts += [self.run_collect(), self.run_finalize()]
                if self._scoring is not None:
                    parts.append(self._scoring.run(self._journal))
                tasks = [group.create_task(part) for part in parts]
                if self._files is not None:
                    self._files.tidy()
                self.batch.delete(self._outdated_groups)
                if (published := self.progress.now.published) is not None:
                    await self._policy.want(PolicyVersion(published.version, published.path))
                await self._run_dispatch()
                liveness().enter("end", limit_s=END_S)
                self._monitor.write_state(msgspec.structs.replace(self._state(), complete=True))
                await asyncio.sleep(self._linger_s)
                if self._files is not None:
                    await self._files.tidy()
                for task in tasks:
                    task.cancel()
                self.batch.close()
        finally:
            self._batches.close()
            if self._files is not None:
                self._files.close()
            self._recorder.close()
            self._metrics.close()
        self._journal.write(OrchestratorDone(self.progress.now.done_step))

    async def _run_dispatch(self) -> None:
        while not self._is_complete():
            liveness().enter("event loop")
            # First, so that no request is sent to an address that was given up.
            self._policy.follow(self._arguments.engine_urls())
            self._dispatch.drop_lost_replicas()
            now = time.monotonic()
            if now >= self._next_tick:  # not at the end of each of thousands of rollouts
                self._next_tick = now + TICK_S
                self._tick()
            if self._evaluator.running and self.progress.now.done_step >= self._recipe.max_steps:
                self._monitor.moved()  # only the evaluation still runs, and it has timeouts of its own
            await self._dispatch.run_once()
            await self._feedback.wait(TICK_S)

    async def run_collect(self) -> None:
        """Pass what workers report to the collect stage, until cancelled."""
        try:
            while True:
                for event in await self.workers.receive():
                    self.take_event(event)
        finally:
            self.workers.close()

    def take_event(self, event: WorkerEvent) -> None:
        """Pass an event through the collect stage, and a group that it completes on to the finalize stage."""
        if (group := self.collect.handle(event)) is not None:
            self.complete.put_nowait(CompleteGroup(group))

    async def run_finalize(self) -> None:
        """Pass complete groups through the finalize stage to the batch stage, until cancelled."""
        try:
            while True:
                groups = [await self.complete.get()]
                size = groups[0].group.nbytes
                # Small groups that wait are written together. Large ones take seconds each, so each counts at once.
                while not self.complete.empty() and size < WRITTEN_TOGETHER:
                    groups.append(self.complete.get_nowait())
                    size += groups[-1].group.nbytes
                async for finalized in self.finalizer.finalize(groups):
                    self.batch.add(finalized)
        finally:
            self.finalizer.close()

    def _tick(self) -> None:
        for event in self.workers.expire():
            self.take_event(event)
        self._curricula.set_tasks(self.workers.tasks)
        try:
            self._monitor.check_engines(self._policy.useless)
            self._monitor.check_stall(self._suspect, self.dispatcher.runs, self.workers.environments)
        except PrimeslurmError as error:
            self._monitor.write_state(msgspec.structs.replace(self._state(), failure=str(error)))
            raise
        self._monitor.report(self._state)

    def _is_complete(self) -> bool:
        """Tell whether the last step is committed, its policy is on the engines, and all evaluations have ended."""
        # The file COMMITTED alone is not enough: the trainer that is about to report it would find nobody.
        last, now = self._recipe.max_steps, self.progress.now
        if now.published is None or now.published.version < last or now.committed < last:
            return False
        if self._final_policy_at is None:
            self._final_policy_at = time.monotonic()
        waited_s = time.monotonic() - self._final_policy_at
        if (self._policy.current_version or 0) < last and not self._evaluator.running:
            if waited_s <= self._recipe.weights.load_s:
                return False
            self._evaluator.give_up(last, f"no engine had its policy for {self._recipe.weights.load_s} s")
        return self._evaluator.settled(last)

    async def _before_update(self, version: int) -> None:
        # Rollouts that the update makes too old are cancelled before engines pause, so they delay no update.
        self.batch.apply_age_limit(max(self.dispatcher.step, version + 1))
        await self._dispatch.cancel()

    async def _after_update(self, version: int) -> None:
        self.dispatcher.version = version
        self._feedback.wake()
        self._monitor.policy_current(version)

    def _suspect(self) -> str:
        engines, environments = self._policy.pool.report(), self.workers.environments
        return suspect_of_stall(engines, environments, self.dispatcher, self._monitor.trained_step)

    def _state(self) -> OrchestratorState:
        dispatcher = self.dispatcher
        return OrchestratorState(
            step=self.progress.now.done_step,
            max_steps=self._recipe.max_steps,
            version=self._policy.current_version,
            inflight=dispatcher.inflight,
            ready_groups=len(dispatcher.ready),
            ready_rollouts=dispatcher.ready.rollouts,
            open_groups=len(dispatcher.open),
            unscored_groups=len(dispatcher.unscored),
            counts=dict(dispatcher.counts + self._filter.counts),
            engines=self._policy.pool.report(),
            failures=self._monitor.failures,
            environments=sorted(self.workers.environments),
            evaluation=self._evaluator.progress,
            rollouts_by_node=self.workers.load,
            shares=self._dispatch.replica_loads,
        )


def suspect_of_stall(
    engines: Mapping[str, EngineRecord],
    environments: Collection[str],
    dispatcher: Dispatcher,
    trained_step: int | None,
) -> str:
    """Return the suspect of a stall in words: what all others wait for. `environments`: those that have a worker."""
    late = {name: engine.state for name, engine in engines.items() if engine.state != "CURRENT"}
    if late:
        return "engines " + ", ".join(f"{name} ({state})" for name, state in late.items())
    missing = dispatcher.limits.ratios.keys() - environments
    if missing:
        return f"no worker of environment {', '.join(sorted(missing))}"
    if dispatcher.unscored:
        return f"teacher ({len(dispatcher.unscored)} groups wait for its log-probabilities)"
    if dispatcher.inflight:
        return f"{dispatcher.inflight} rollouts in flight, through {', '.join(dispatcher.replicas.routers)}"
    if trained_step is not None:
        return f"trainer (has the batch of step {trained_step})"
    return "trainer (requests nothing)"

"""The orchestrator: lets rollouts run, forms batches, answers the trainer, follows the policy.

All state changes happen on one event loop. What the trainer was told is on disk before it is told, so that a killed
orchestrator continues with the same answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from primeslurm.base.errors import PrimeslurmError
from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches, StepShard
from primeslurm.orchestrator.batching.group_filter import GroupFilter
from primeslurm.orchestrator.batching.length_penalties import penalised
from primeslurm.orchestrator.batching.shard_files import ShardFiles
from primeslurm.orchestrator.dispatch.concurrency import Concurrency
from primeslurm.orchestrator.dispatch.curricula import OUTCOMES, Curricula
from primeslurm.orchestrator.evaluation.evaluator import Evaluator
from primeslurm.orchestrator.pipeline.finalize import GroupFinalizer
from primeslurm.orchestrator.pipeline.progress import CHECKPOINT_PART, PROGRESS, ProgressFile, RunProgress, restore
from primeslurm.orchestrator.pipeline.recovery import recover
from primeslurm.orchestrator.pipeline.stall_diagnosis import suspect
from primeslurm.orchestrator.rollouts import worker_deaths
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job, JobFailure
from primeslurm.orchestrator.rollouts.spool import Spool, SpooledGroup
from primeslurm.orchestrator.rollouts.worker_pool import WorkerPool
from primeslurm.orchestrator.teacher.scoring import scoring_of
from primeslurm.orchestrator.telemetry.batch_metrics import batch_metrics, oldest_age, reward_mean
from primeslurm.orchestrator.telemetry.engine_metrics import Sample
from primeslurm.orchestrator.telemetry.progress_monitor import ProgressMonitor
from primeslurm.orchestrator.telemetry.rollout_failures import headline
from primeslurm.orchestrator.weight_transfer.engine_client import PolicyVersion
from primeslurm.orchestrator.weight_transfer.sessions import TransferSessions
from primeslurm.orchestrator.weight_transfer.weight_update_loop import weight_update_loop
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.orchestrator import AnyEnvironment
from primeslurm.records.attempt import require_newest
from primeslurm.records.events.training import BatchFormed, OrchestratorDone, OrchestratorUp, ReplicaLost
from primeslurm.records.heartbeats import liveness
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import MetricsLog, Row
from primeslurm.records.state import OrchestratorState
from primeslurm.wire.batches.file_ranges import FrameSource
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.link.messages import Answer, Committed, GetBatch, Request, Save, StepDone
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.weight_transfer.messages import NewPolicy, OfferTransfer, SessionState

log = logging.getLogger(__name__)

HOLD_S = 4.0
"""A GetBatch that cannot be answered is held for this long: shorter than the trainer's retry."""
TICK_S = 0.2
CLAIM_S = 30.0
"""A restarted orchestrator waits so long at most for its workers to say what they run: then a silent one is gone."""
END_S = 1800.0
"""What is left to be done at the end, such as handing metrics in, may take so long."""
LINGER_S = 3.0
"""Default of the time that the trainer's last requests are still answered after everything is done."""


class OrchestratorPipeline:
    """One attempt's orchestrator. `await run()` returns when the run is complete."""

    def __init__(self, recipe: Recipe, arguments: OrchestratorArguments, linger_s: float = LINGER_S) -> None:
        self._recipe = recipe
        self._arguments = arguments
        self._linger_s = linger_s
        self._journal = Journal(arguments.attempt_dir, "orchestrator")
        self._journal.note_storage_faults()
        self._is_restarted = self._resumes_evaluation = self._journal.has_begun
        self._claiming_until: float | None = None
        require_newest(arguments.run_dir, arguments.attempt)
        progress = restore(arguments.run_dir, arguments.attempt)
        self._spool = Spool(arguments.run_dir / "rollouts")
        self._environments = {environment.label: environment for environment in recipe.environments}
        self._algorithm = algorithms.from_recipe(recipe)
        self._batches = Batches(recipe, self._algorithm, self._spool.on_disk, progress.committed)
        self._files = None
        if recipe.orchestrator.rollout_transport == "filesystem":
            self._files = ShardFiles(arguments.run_dir, arguments.attempt, self._batches, progress.committed)
        self._metrics = MetricsLog(arguments.run_dir, progress.done_step, **recipe.metrics_options())
        self._curricula = Curricula(recipe, arguments.run_dir / OUTCOMES, progress.outcomes, progress.fresh)
        self._curricula.set_tasks(progress.tasks)
        self._admission = GroupFilter(recipe, self._algorithm, self._curricula, self._journal)
        self._finishing = GroupFinalizer(self._admission, self._spool, self._count, self._on_rejected, self._on_scored)
        self._deaths = worker_deaths.load(arguments.run_dir)
        guilty = worker_deaths.positions(self._deaths.guilty)
        self._dispatch, gone = recover(recipe, arguments, progress, self._spool, self._batches, self._curricula, guilty)
        self._progress = ProgressFile(arguments.run_dir / PROGRESS, progress, self._dispatch, self._curricula)
        self._evaluator = Evaluator(
            recipe, arguments, progress.newest_version, self._dispatch.incarnation, self._journal, self._metrics
        )
        self._workers = WorkerPool(
            arguments.env_bind,
            self._on_result,
            self._on_lost,
            self._on_unusable,
            max_per_node=recipe.deployment.max_rollouts_per_node,
            claim=self._on_claim,
            keeps=self._dispatch.keeps,
            deaths=self._deaths,
            on_death=self._on_death,
            on_answers=lambda reports: self._policy.take_answers(reports),
        )
        self._link = OrchestratorLink(arguments.bind, self._handle)
        self._sessions = TransferSessions(recipe.inference.parallel.tp, recipe.weights.timeout_s)
        self._policy = weight_update_loop(
            recipe,
            arguments,
            self._journal,
            sessions=self._sessions,
            before_update=self._before_update,
            after_update=self._after_update,
        )
        self._watch = ProgressMonitor(
            recipe, self._journal, arguments.engine_urls, resumed=progress.done_step > 0, looked=self._on_look
        )
        self._concurrency = None
        if recipe.orchestrator.concurrency == "adaptive":
            self._concurrency = Concurrency(arguments.routers, arguments.engines, recipe.max_inflight)
            self._dispatch.replicas.shares = self._concurrency.shares  # dispatch begins before the first look
        unscored = self._dispatch.unscored.values()
        self._scoring = scoring_of(recipe, arguments, unscored, self._finishing.scored, self._damaged)
        self._batch_formed = asyncio.Condition()
        self._reporting = asyncio.Lock()
        """What the trainer reports counts once: a repeat waits until the first is on disk."""
        self._forgetting: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._cancelled: list[str] = []
        self._gone = gone
        """Groups on disk that this process found too old or undone when it began."""
        self._final_policy_at: float | None = None
        self._next_tick = -math.inf

    async def run(self) -> None:
        """Run until the last step is committed and its policy is on the engines.

        Raises:
            StallError: nothing moved for the recipe's stall timeout.
            UnrecoverableError: an environment cannot work.
        """
        self._journal.write(OrchestratorUp(self._progress.now.next_step, len(self._dispatch.ready)))
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(part)
                    for part in (self._link.serve(), self._workers.serve(), self._policy.run(), self._watch.scrape())
                ]
                background.append(tasks.create_task(self._finishing.run()))
                if self._files is not None:
                    self._files.tidy()
                self._forget(self._gone)
                if self._scoring is not None:
                    background.append(tasks.create_task(self._scoring.run(self._journal)))
                if self._progress.now.published:
                    await self._policy.want(_policy(self._progress.now.published))
                await self._loop()
                liveness().enter("end", limit_s=END_S)
                self._watch.write_state(self._state())
                await asyncio.sleep(self._linger_s)
                if self._files is not None:
                    await self._files.tidy()
                for task in (*background, *self._forgetting):
                    task.cancel()
        finally:
            self._batches.close()
            if self._files is not None:
                self._files.close()
            self._metrics.close()
        self._journal.write(OrchestratorDone(self._progress.now.done_step))

    async def _loop(self) -> None:
        while not self._complete():
            liveness().enter("event loop")
            self._follow_addresses()  # before anything is sent to where nothing is any more
            if self._is_due():
                self._tick()
            cancelled, self._cancelled = self._cancelled, []
            await self._workers.cancel(cancelled)
            await self._evaluate()  # first: its bound is its own, and training takes all that environments have left
            while self._may_dispatch() and (job := self._dispatch.next_job(self._workers.available)):
                self._watch.rollout_started(job)
                await self._workers.send(job)
            await self._pause()

    def _is_due(self) -> bool:
        """Whether it is time for what is looked at now and then, not whenever one of thousands of rollouts ends."""
        now = time.monotonic()
        if now < self._next_tick:
            return False
        self._next_tick = now + TICK_S
        return True

    def _tick(self) -> None:
        self._workers.expire()
        self._curricula.set_tasks(self._workers.tasks)
        self._check()
        self._watch.report(self._state)

    def _may_dispatch(self) -> bool:
        """After a restart workers first say what they run, or the same would begin anew."""
        self._is_restarted = self._is_restarted and not self._have_claimed(self._recipe.environments)
        return not self._is_restarted and not self._spool.waiting

    def _have_claimed(self, environments: Sequence[AnyEnvironment]) -> bool:
        """Whether the workers of environments have said what they run, or had the time to."""
        if self._claiming_until is None:
            self._claiming_until = time.monotonic() + CLAIM_S
        everybody = sum(environment.workers for environment in environments)
        settled = self._workers.settled({environment.label for environment in environments}) >= everybody
        return settled or time.monotonic() >= self._claiming_until

    def _on_claim(self, job: Job, runs: bool) -> bool:
        if self._evaluator.claim(job):
            return True
        if not self._dispatch.claim(job, runs=runs):
            return False
        self._watch.rollout_started(job)
        return True

    def _check(self) -> None:
        """End a run that gets nowhere; the last words are for the head."""
        try:
            self._watch.check_engines(self._policy.useless)
            self._watch.check_stall(self._suspect, self._dispatch.runs, self._workers.environments)
        except PrimeslurmError as error:
            self._watch.write_state(msgspec.structs.replace(self._state(), failure=str(error)))
            raise

    def _follow_addresses(self) -> None:
        """Do without what the head gave up, and wait no longer for answers from where something was."""
        self._policy.follow(self._arguments.engine_urls())
        for router in self._arguments.addresses.lost.intersection(self._dispatch.routers):
            jobs = self._dispatch.drop_router(router)
            if self._concurrency is not None:
                self._concurrency.drop(router)
            jobs += self._evaluator.drop_router(router)
            self._cancelled += jobs
            self._journal.write(ReplicaLost(router, len(jobs)))

    async def _evaluate(self) -> None:
        if self._evaluator.running and self._progress.now.done_step >= self._recipe.max_steps:
            self._watch.moved()  # nothing else does; and an evaluation that stands still ends by itself
        version = self._dispatch.version
        await self._workers.cancel(self._evaluator.follow(version, self._workers.tasks))
        evaluation = self._recipe.evaluation
        if evaluation is not None and self._resumes_evaluation:
            self._resumes_evaluation = not self._have_claimed(evaluation.environments)
        while not self._resumes_evaluation and (job := self._evaluator.next_job(self._workers.available, version)):
            if job.task_key in self._deaths.guilty:
                self._evaluator.give_up_task(job, self._deaths.reason(job))
                continue
            await self._workers.send(job)

    async def _pause(self) -> None:
        """Until something happened that may let a job start, but no longer than a tick."""
        try:
            async with asyncio.timeout(TICK_S):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _complete(self) -> bool:
        """The last step is committed, and its policy is on the engines or has been for too long on the way.

        Evaluations are done: the last one needs the final policy.

        That COMMITTED is there is not enough: a trainer that is about to announce it would find nobody.
        """
        last, now = self._recipe.max_steps, self._progress.now
        if now.published is None or now.published.version < last or now.committed < last:
            return False
        if self._final_policy_at is None:
            self._final_policy_at = time.monotonic()
        waited = time.monotonic() - self._final_policy_at
        if (self._policy.current_version or 0) < last and not self._evaluator.running:
            if waited <= self._recipe.weights.timeout_s:
                return False
            self._evaluator.give_up(last, f"no engine had its policy for {self._recipe.weights.timeout_s} s")
        return self._evaluator.settled(last)

    def _on_look(self, samples: Mapping[str, Sample]) -> None:
        """Give each replica as many rollouts as its engines have room for."""
        if self._concurrency is not None:
            replicas = self._dispatch.replicas
            self._concurrency.look(samples, replicas.load, replicas.ended, self._evaluator.load)
            replicas.shares = self._concurrency.shares
            self._wake.set()

    # the trainer's requests

    async def _handle(self, request: Request) -> Sequence[FrameSource] | Answer:
        match request:
            case GetBatch():
                return await self._get_batch(request)
            case NewPolicy():
                return Answer("ok", version=await self._new_policy(request))
            case OfferTransfer():
                if self._is_outdated(request.version):
                    return Answer("ok")
                return await self._sessions.answer(request, self._policy.pool.wanting, HOLD_S)
            case SessionState():
                lost = self._sessions.lost_from(request.session)
                return Answer("lost", lost) if lost else Answer("ok")
            case StepDone():
                await self._step_done(request)
            case Save():
                await self._save(Path(request.directory))
            case Committed():
                await self._committed(request.step)
                return Answer("ok", keep=self._evaluator.kept_steps(request.step))
        return Answer("ok")

    async def _get_batch(self, request: GetBatch) -> Sequence[FrameSource] | Answer:
        share = StepShard(request.step, request.shard)
        if (known := self._batches.encoded(share)) is not None:  # a repeat, or the next chunk
            return known
        if request.step > self._recipe.max_steps:
            return Answer("stop")
        if request.step > self._dispatch.step:
            raise ValueError(f"step {request.step} was asked for, but step {self._dispatch.step} is next")
        if not request.ahead:
            self._sessions.close()
        deadline = time.monotonic() + HOLD_S
        if (waiting := await self._batch_of(request, deadline)) is not None:
            return waiting
        within_s = max(0.0, deadline - time.monotonic())
        found: Sequence[FrameSource] | Answer | None
        if self._files is None:
            found = await self._batches.answer(share, within_s)
        else:
            found = await self._files.answer(share, unreadable=request.unreadable, within_s=within_s)
        if found is None:
            raise ValueError(f"the rollouts of step {request.step} are no longer kept")
        return found

    async def _batch_of(self, request: GetBatch, deadline: float) -> Answer | None:
        """Wait until the batch is formed; or the answer that it is not."""
        async with self._batch_formed:
            while request.step == self._dispatch.step:
                if (unread := self._unread(request.ahead)) is not None:
                    await self._read(unread)
                    if time.monotonic() > deadline:
                        return Answer("wait")
                    continue
                if await self._form_batch(request.ahead):
                    break
                if not request.ahead and self._policy.wants_transfer():
                    return Answer("transfer")
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._batch_formed.wait()
                except TimeoutError:
                    return Answer("wait")
        return None

    def _unread(self, ahead: bool) -> SpooledGroup | None:
        """A group of the next batch that is on disk alone, since this process began."""
        if ahead and not self._dispatch.may_form_early():
            return None
        self._sweep(self._dispatch.step)
        return next((group for group in self._dispatch.next_batch() if isinstance(group, SpooledGroup)), None)

    async def _read(self, group: SpooledGroup) -> None:
        """Read a group that waits for a batch; if it is damaged, its example comes again."""
        try:
            whole = await asyncio.to_thread(group.whole)
        except DamagedError as error:
            if any(other is group for other in self._dispatch.ready):  # it was not given up meanwhile
                self._damaged(group, error)
        else:
            self._dispatch.replace_with_loaded(group, whole)

    def _damaged(self, group: RolloutGroup, error: DamagedError) -> None:
        """Have the example of a group whose file is damaged come again."""
        self._spool.note_damaged(group.id, error)
        self._dispatch.unreadable(group.id)
        self._forget([group.id])
        self._wake.set()

    async def _form_batch(self, ahead: bool) -> bool:
        """Form the next step's batch if there are enough groups; it is on record before it is given out.

        Whoever asks for it meanwhile waits for the lock of `_batch_formed`.

        Args:
            ahead: the trainer does not need it yet.
        """
        step = self._dispatch.step
        if ahead and not self._dispatch.may_form_early():
            return False
        self._sweep(step)
        groups = self._dispatch.cut(ahead)
        if groups is None:
            return False
        known = self._progress.now.memory.get(step, {})
        after = dict(await asyncio.to_thread(self._algorithm.remember, known, groups))

        def formed(now: RunProgress) -> dict[str, Any]:
            batches = {**now.batches, step: [group.id for group in groups]}
            memory = now.memory | ({step + 1: after} if after else {})
            return {"next_step": step + 1, "batches": batches, "memory": memory}

        try:
            await self._progress.record(formed)
        except OSError as error:
            log.warning("the batch of step %d is held back, it cannot be recorded: %s", step, error)
            self._dispatch.return_batch(groups)
            return False
        self._batches.add(step, groups, known)
        self._watch.batch_given(step)
        self._journal.write(BatchFormed(step, reward_mean(groups), oldest_age(groups, step)))
        return True

    def _is_outdated(self, version: int) -> bool:
        """Whether a trainer that was started again repeats steps, and offers a policy that nobody wants any more."""
        known = self._progress.now.published
        return known is not None and version < known.version

    async def _new_policy(self, request: NewPolicy) -> int:
        """Make engines want the policy; returns the newest one."""
        async with self._reporting:
            known = self._progress.now.published
            if known is not None and request.version <= known.version:
                return known.version
            await self._progress.record(lambda now: {"published": request})
            if not request.path:
                self._sessions.expect(request.version)
            self._watch.policy_wanted(request.version)
            await self._policy.want(_policy(request))
            return request.version

    async def _step_done(self, request: StepDone) -> None:
        row: Row = {}
        if request.step > self._progress.now.done_step and (groups := await self._batches.read(request.step)):
            row = await asyncio.to_thread(batch_metrics, groups, request.step, self._recipe.seq_len)
        async with self._reporting:
            await self._count_step(request, row)

    async def _count_step(self, request: StepDone, row: Row) -> None:
        if request.step <= self._progress.now.done_step:  # a repeat, perhaps of one that was dealt with meanwhile
            return
        require_newest(self._arguments.run_dir, self._arguments.attempt)
        row |= self._watch.step_metrics(self._dispatch, self._policy.current_version)
        row |= self._admission.take_metrics()
        row |= {f"memory/{name}": value for name, value in self._progress.now.memory.get(request.step + 1, {}).items()}
        row |= self._scoring.take_metrics() if self._scoring else {}
        row |= {f"trainer/{name}": value for name, value in request.metrics.items()}
        try:
            self._metrics.write(request.step, row)
        except OSError as error:
            log.warning("metrics of step %d are not in the file yet: %s", request.step, error)
        await self._progress.note(lambda now: {"done_step": request.step})
        self._dispatch.step_done()
        self._watch.step_done(request.step, row)

    async def _save(self, directory: Path) -> None:
        """The orchestrator's part of a checkpoint, with all that was recorded of its steps: on disk, or OSError."""

        def sync() -> None:
            self._metrics.sync()
            self._journal.sync()

        await self._progress.save(directory / CHECKPOINT_PART, before=sync)

    async def _committed(self, step: int) -> None:
        gone = {name for s, ids in self._progress.now.batches.items() if s <= step for name in ids}
        self._batches.committed(step)
        self._dispatch.committed(gone)
        if self._files is not None:
            self._files.committed(step)
        await self._finishing.delete(gone)  # before the record forgets them

        def forgotten(now: RunProgress) -> dict[str, Any]:
            kept = {s: ids for s, ids in now.batches.items() if s > step}
            memory = {s: known for s, known in now.memory.items() if s > step}
            return {"batches": kept, "memory": memory, "committed": max(step, now.committed)}

        await self._progress.note(forgotten)

    # rollouts

    def _on_result(self, job: str, outcome: tuple[Rollout, ...] | JobFailure) -> None:
        if self._evaluator.runs(job):
            self._evaluator.result(job, outcome)
            self._wake.set()
        if not self._dispatch.runs(job):
            return
        self._wake.set()
        if isinstance(outcome, JobFailure):
            log.warning("job %s failed: %s", job, outcome.error)
            group = self._dispatch.group_of(job)
            self._watch.rollout_failed(job, outcome)
            self._cancelled += self._dispatch.failed(job, outcome.cause)
            if group.id not in self._dispatch.open:
                reason = headline(outcome.error)
                self._watch.task_given_up(group.environment, group.example, reason, group.task, kills=False)
            return
        self._watch.rollout_finished(outcome)
        complete = self._dispatch.finished(job, outcome)
        self._cancelled += self._dispatch.take_surplus_jobs()
        if complete is not None:
            self._on_complete(complete)

    def _on_complete(self, group: RolloutGroup) -> None:
        self._finishing.complete(penalised(group, self._environments[group.environment]))

    def _on_rejected(self, group: RolloutGroup, reason: str) -> None:
        self._dispatch.rejected(group, reason)
        self._watch.group_rejected(reason, len(group.rollouts))
        self._wake.set()
        self._notify_if_enough()  # a batch may have waited for it

    def _count(self, group: RolloutGroup) -> None:
        """Take a group whose rollouts are finished, and on disk."""
        self._watch.group_kept()
        self._wake.set()
        add = self._dispatch.add_ready if self._scoring is None else self._dispatch.add_unscored
        if not add(group):
            self._forget([group.id])
        elif self._scoring is None:
            self._notify_if_enough()
        else:
            self._scoring.add(group)

    def _on_scored(self, group: RolloutGroup) -> None:
        self._wake.set()
        if self._dispatch.scored(group):
            self._notify_if_enough()
        else:  # it became too old while it was written
            self._forget([group.id])

    def _forget(self, groups: Iterable[str]) -> None:
        """Delete groups that were given up, once it is on record that their examples come again."""
        if names := list(groups):
            task = asyncio.create_task(self._delete_once_recorded(names))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _delete_once_recorded(self, names: Sequence[str]) -> None:
        try:
            await self._progress.record(lambda now: {})
        except OSError as error:  # whoever comes again is written over them
            log.warning("%d groups that are too old stay on disk: %s", len(names), error)
        else:  # but for those that are there again already
            await self._finishing.delete([name for name in names if not self._dispatch.holds(name)])

    def _on_unusable(self, environment: str, worker: int, error: str) -> None:
        log.warning("worker %d cannot serve %s: %s", worker, environment, error)
        if environment in self._environments:
            self._watch.worker_failed(environment, worker, error)
        else:
            self._evaluator.unusable(environment, worker, error)

    def _on_death(self, environment: str, worker: int, guilty: Sequence[Job]) -> None:
        """Give up the tasks that turned out to kill workers."""
        worker_deaths.keep(self._arguments.run_dir, self._deaths)
        for job in guilty:
            reason = self._deaths.reason(job)
            log.warning("task %d of %s is given up: %s", job.example, job.environment, reason)
            if environment in self._environments:
                self._watch.task_given_up(environment, job.example, reason, job.task, kills=True)
                self._cancelled += self._dispatch.give_up(environment, job.example)
            else:
                self._cancelled += self._evaluator.give_up_task(job, reason)
        self._wake.set()

    def _on_lost(self, job: str) -> None:
        if self._dispatch.runs(job):
            self._dispatch.lost(job)
        elif self._evaluator.runs(job):
            self._evaluator.lost(job)

    def _notify_if_enough(self) -> None:
        if self._dispatch.ready_rollouts < self._dispatch.limits.batch_size:
            return

        async def notify() -> None:
            async with self._batch_formed:
                self._batch_formed.notify_all()

        self._notifying = asyncio.create_task(notify())

    def _sweep(self, step: int) -> None:
        swept = self._dispatch.apply_age_limit(step)
        self._forget(group.id for group in swept.stale)
        if self._scoring is not None:
            self._scoring.drop(swept.stale)
        self._cancelled += swept.cancelled
        for group in swept.early:
            self._on_complete(group)

    async def _before_update(self, version: int) -> None:
        """Rollouts that become too old are dropped before engines are paused: none of them costs an update time."""
        self._sweep(max(self._dispatch.step, version + 1))
        cancelled, self._cancelled = self._cancelled, []
        await self._workers.cancel(cancelled)

    async def _after_update(self, version: int) -> None:
        self._dispatch.version = version
        self._wake.set()
        self._watch.policy_current(version)

    # what is seen from outside

    def _suspect(self) -> str:
        engines, environments = self._policy.pool.report(), self._workers.environments
        return suspect(engines, environments, self._dispatch, self._watch.trained_step)

    def _state(self) -> OrchestratorState:
        dispatch = self._dispatch
        return OrchestratorState(
            step=self._progress.now.done_step,
            max_steps=self._recipe.max_steps,
            version=self._policy.current_version,
            inflight=dispatch.inflight,
            ready_groups=len(dispatch.ready),
            ready_rollouts=dispatch.ready_rollouts,
            open_groups=len(dispatch.open),
            unscored_groups=len(dispatch.unscored),
            counts=dict(dispatch.counts + self._admission.counts),
            engines=self._policy.pool.report(),
            failures=self._watch.failures,
            environments=sorted(self._workers.environments),
            evaluation=self._evaluator.progress,
            rollouts_by_node=self._workers.load,
            shares=self._concurrency.report if self._concurrency is not None else {},
        )


def _policy(announced: NewPolicy) -> PolicyVersion:
    return PolicyVersion(announced.version, announced.path)

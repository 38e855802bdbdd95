"""Stage 5, serve: answers the trainer's requests for batches, and records what it reports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primeslurm.orchestrator.batching.batches import Batches, StepShard
from primeslurm.orchestrator.batching.group_filter import GroupFilter
from primeslurm.orchestrator.batching.shard_files import ShardFiles
from primeslurm.orchestrator.pipeline.batch import BatchStage
from primeslurm.orchestrator.pipeline.context import PipelineContext
from primeslurm.orchestrator.pipeline.finalize import GroupFinalizer
from primeslurm.orchestrator.pipeline.progress import CHECKPOINT_PART, ProgressFile, RunProgress
from primeslurm.orchestrator.telemetry.batch_metrics import batch_metrics
from primeslurm.orchestrator.telemetry.sample_tables import SampleTables
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.orchestrator.weight_updates.sessions import TransferSessions
from primeslurm.records.attempt import first_step_metrics, require_newest
from primeslurm.records.metrics import MetricsLog, Row
from primeslurm.records.monitors import SampleRow
from primeslurm.wire.batches.file_ranges import FrameSource
from primeslurm.wire.link.messages import Answer, Committed, GetBatch, Request, Save, StepDone
from primeslurm.wire.weight_transfer.messages import NewPolicy, OfferTransfer, SessionState

log = logging.getLogger(__name__)

# Longest time that a request for a batch is held before the answer is "wait". Shorter than the trainer's retry.
HOLD_S = 4.0


class TrainerService:
    """Input: recorded batches. Output: answers to the trainer.

    `files`: writes shards where ranks read batches as files. None: shards are sent.
    """

    def __init__(
        self,
        context: PipelineContext,
        *,
        batch: BatchStage,
        batches: Batches,
        files: ShardFiles | None,
        finalizer: GroupFinalizer,
        group_filter: GroupFilter,
        progress: ProgressFile,
        sessions: TransferSessions,
        metrics: MetricsLog,
    ) -> None:
        self._context, self._dispatcher, self._policy = context, context.dispatcher, context.policy
        self._monitor, self._evaluator = context.monitor, context.evaluator
        self._batch, self._batches, self._files = batch, batches, files
        self._finalizer, self._filter, self._progress = finalizer, group_filter, progress
        self._sessions, self._metrics, self._recorder = sessions, metrics, context.recorder
        self._is_first_step = not context.journal.has_begun
        self._samples = SampleTables(context.recipe)
        # A report counts once: a repeat waits until the first one is on disk.
        self._reporting = asyncio.Lock()

    async def handle(self, request: Request) -> Sequence[FrameSource] | Answer:
        """Answer one request of a rank."""
        match request:
            case GetBatch():
                return await self._get_batch(request)
            case NewPolicy():
                return Answer("ok", version=await self._new_policy(request))
            case OfferTransfer():
                published = self._progress.now.published
                if published is not None and request.version < published.version:
                    self._sessions.close()
                    return Answer("ok")  # a restarted trainer repeats steps whose policy is outdated
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
        shard = StepShard(request.step, request.shard)
        if (encoded := self._batches.encoded(shard)) is not None:  # a repeat, or the next chunk
            return encoded
        if request.step > self._context.recipe.max_steps:
            return Answer("stop")
        if request.step > self._dispatcher.step:
            raise ValueError(f"step {request.step} is requested, but step {self._dispatcher.step} is next")
        if not request.ahead and request.step == self._dispatcher.step:
            self._sessions.close()  # otherwise a thread of the trainer may still send the policy
        deadline = time.monotonic() + HOLD_S
        if (interrupted := await self._wait_for_batch(request, deadline)) is not None:
            return interrupted
        within_s = max(0.0, deadline - time.monotonic())
        answer: Sequence[FrameSource] | Answer | None
        if self._files is None:
            answer = await self._batches.answer(shard, within_s)
        else:
            answer = await self._files.answer(shard, unreadable=request.unreadable, within_s=within_s)
        if answer is None:
            raise ValueError(f"the rollouts of step {request.step} were deleted")
        return answer

    async def _wait_for_batch(self, request: GetBatch, deadline: float) -> Answer | None:
        """Return None once the batch is formed, or an answer that ends the wait."""
        async with self._batch.changed:
            while request.step == self._dispatcher.step:
                if await self._batch.form(early=request.ahead, deadline=deadline):
                    break
                if not request.ahead and self._policy.wants_transfer():
                    return Answer("transfer")  # engines need weights that only the waiting trainer can send
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._batch.changed.wait()
                except TimeoutError:
                    return Answer("wait")
        return None

    async def _new_policy(self, request: NewPolicy) -> int:
        """Record a policy version, which the weight update loop then sends. Return the newest recorded version."""
        async with self._reporting:
            published = self._progress.now.published
            if published is not None and request.version <= published.version:
                self._end_session(request, published)
                return published.version
            await self._progress.record(lambda now: {"published": request})
            if not request.path:
                self._sessions.expect(request.version)
            self._monitor.policy_wanted(request.version)
            await self._policy.want(PolicyVersion(request.version, request.path))
            return request.version

    def _end_session(self, repeated: NewPolicy, published: NewPolicy) -> None:
        """End the session of a trainer that has restarted, and announces a version again."""
        if repeated.version == published.version and not repeated.path:
            self._sessions.expect(repeated.version)
        else:
            self._sessions.close()

    async def _step_done(self, request: StepDone) -> None:
        row: Row = {}
        samples: list[SampleRow] = []
        if request.step > self._progress.now.done_step and (groups := await self._batches.read(request.step)):
            row = await asyncio.to_thread(batch_metrics, groups, request.step, self._context.recipe.seq_len)
            samples = await asyncio.to_thread(self._samples.of, groups, request.step)
        async with self._reporting:
            if request.step > self._progress.now.done_step:  # else a repeat that was handled meanwhile
                await self._count_step(request, row, samples)

    async def _count_step(self, request: StepDone, row: Row, samples: Sequence[SampleRow]) -> None:
        require_newest(self._context.arguments.run_dir, self._context.arguments.attempt)
        version = self._policy.current_version
        row |= self._monitor.step_metrics(self._dispatcher.counts, self._dispatcher.queue_lengths, version)
        row |= self._policy.update_metrics()
        if self._is_first_step:
            self._is_first_step = False
            row |= first_step_metrics(self._context.arguments.attempt_dir)
        row |= self._filter.take_metrics() | self._recorder.take_metrics()
        row |= {f"memory/{name}": value for name, value in self._progress.now.memory.get(request.step + 1, {}).items()}
        row |= self._batch.scoring.take_metrics() if self._batch.scoring is not None else {}
        row |= {f"trainer/{name}": value for name, value in request.metrics.items()}
        try:
            self._metrics.write(request.step, row, samples)
        except OSError as error:
            log.warning("metrics of step %d are not written yet: %s", request.step, error)
        await self._progress.note(lambda now: {"done_step": request.step})
        self._dispatcher.step_done()
        self._monitor.step_done(request.step, row)

    async def _save(self, directory: Path) -> None:
        """Write the orchestrator's part of a checkpoint. Raises OSError if it is not on disk."""

        def sync() -> None:
            self._metrics.sync()
            self._context.journal.sync()

        await self._progress.save(directory / CHECKPOINT_PART, before=sync)

    async def _committed(self, step: int) -> None:
        groups = {name for s, ids in self._progress.now.batches.items() if s <= step for name in ids}
        self._batches.committed(step)
        self._dispatcher.committed(groups)
        if self._files is not None:
            self._files.committed(step)
        # Delete the files before the record drops the groups. A restart would otherwise find files that no record
        # names, and put their groups into a new batch.
        await self._finalizer.delete(groups)

        def committed(now: RunProgress) -> dict[str, Any]:
            batches = {s: ids for s, ids in now.batches.items() if s > step}
            memory = {s: values for s, values in now.memory.items() if s > step}
            return {"batches": batches, "memory": memory, "committed": max(step, now.committed)}

        await self._progress.note(committed)

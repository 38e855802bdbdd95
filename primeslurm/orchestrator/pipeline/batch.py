"""Stage 4, batch: forms each step's batch from finalized groups, and records it before anyone sees it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from primeslurm.orchestrator.algorithms import Algorithm
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.pipeline.context import PipelineContext
from primeslurm.orchestrator.pipeline.finalize import CompleteGroup, FinalizedGroup, GroupFinalizer
from primeslurm.orchestrator.pipeline.progress import ProgressFile, RunProgress
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool, SpooledGroup
from primeslurm.orchestrator.teacher import Scoring
from primeslurm.orchestrator.telemetry.batch_metrics import oldest_age, reward_mean
from primeslurm.records.events.training import BatchFormed
from primeslurm.wire.decoding import DamagedError

log = logging.getLogger(__name__)


class BatchStage:
    """Input: finalized groups. Output: recorded batches, in `Batches`.

    `complete`: input queue of the finalize stage, for groups that the age limit completes early.
    """

    def __init__(
        self,
        context: PipelineContext,
        algorithm: Algorithm,
        batches: Batches,
        progress: ProgressFile,
        spool: Spool,
        finalizer: GroupFinalizer,
        complete: asyncio.Queue[CompleteGroup],
    ) -> None:
        self._dispatcher, self._feedback = context.dispatcher, context.feedback
        self._monitor, self._journal, self._recorder = context.monitor, context.journal, context.recorder
        self._algorithm, self._batches, self._progress = algorithm, batches, progress
        self._spool, self._finalizer, self._complete = spool, finalizer, complete
        # The teacher, if the recipe has one: groups wait for it before they are ready
        self.scoring: Scoring | None = None
        # Notified when a batch may be formed. Its lock is held while one is formed.
        self.changed = asyncio.Condition()
        self._deletions: set[asyncio.Task[None]] = set()
        self._notification: asyncio.Task[None] | None = None

    def add(self, finalized: FinalizedGroup) -> None:
        """Queue a group for a batch, or for the teacher."""
        group, rejected, is_scored = finalized
        self._feedback.wake()
        if rejected:
            self._dispatcher.rejected(group, rejected)
            self._monitor.group_rejected(rejected, len(group.rollouts))
            self._notify()  # a batch may have waited for this group
            return
        if is_scored:
            is_fresh = self._dispatcher.scored(group)
        else:
            self._monitor.group_kept()
            add = self._dispatcher.add_ready if self.scoring is None else self._dispatcher.add_unscored
            is_fresh = add(group)
        if not is_fresh:  # too old by the end of the write
            self._drop_stale([group])
        elif self.scoring is None or is_scored:
            self._notify()
        else:
            self.scoring.add(group)

    def apply_age_limit(self, step: int) -> None:
        """Drop the groups that are too old for `step`; send groups that complete early to the finalize stage."""
        result = self._dispatcher.apply_age_limit(step)
        self._drop_stale(result.stale)
        if self.scoring is not None:
            self.scoring.drop(result.stale)
        self._feedback.cancel(result.cancelled)
        for group in result.early:
            self._complete.put_nowait(CompleteGroup(group))

    async def form(self, *, early: bool, deadline: float) -> bool:
        """Form the next step's batch if there are enough groups. Loading groups from disk ends at the deadline.

        `early`: the trainer still trains the step before. `deadline`: in monotonic time.
        """
        # The caller holds the lock of `changed`, so the step stays the same.
        step = self._dispatcher.step
        while True:
            if early and not self._dispatcher.may_form_early():
                return False
            self.apply_age_limit(step)
            # After a restart, groups are on disk only. A damaged one is noticed now, before the batch is recorded.
            on_disk = next((each for each in self._dispatcher.next_batch() if isinstance(each, SpooledGroup)), None)
            if on_disk is None:
                break
            await self._load(on_disk)
            if time.monotonic() > deadline:
                return False
        groups = self._dispatcher.take_batch(early)
        if groups is None:
            return False
        memory = self._progress.now.memory.get(step, {})
        next_memory = dict(await asyncio.to_thread(self._algorithm.remember, memory, groups))

        def formed(now: RunProgress) -> dict[str, Any]:
            batches = {**now.batches, step: [group.id for group in groups]}
            memories = now.memory | ({step + 1: next_memory} if next_memory else {})
            return {"next_step": step + 1, "batches": batches, "memory": memories}

        try:
            # On disk before it is served: a restarted orchestrator must give the trainer the same batch.
            await self._progress.record(formed)
        except OSError as error:
            log.warning("the batch of step %d is held back, because it cannot be recorded: %s", step, error)
            self._dispatcher.return_batch(groups)
            return False
        self._batches.add(step, groups, memory)
        self._monitor.batch_given(step)
        self._journal.write(BatchFormed(step, reward_mean(groups), oldest_age(groups, step)))
        return True

    def give_up_damaged(self, group: RolloutGroup, error: DamagedError) -> None:
        """Drop a group whose file is damaged. Its example is sampled again."""
        self._spool.note_damaged(group.id, error)
        self._dispatcher.give_up_damaged(group.id)
        self.delete([group.id])
        self._feedback.wake()

    def delete(self, groups: Iterable[str]) -> None:
        """Delete the files of groups that were given up, once it is recorded that their examples are sampled again."""
        if names := list(groups):
            task = asyncio.create_task(self._delete_once_recorded(names))
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)

    def close(self) -> None:
        for task in self._deletions:
            task.cancel()

    async def _delete_once_recorded(self, names: Sequence[str]) -> None:
        try:
            await self._progress.record(lambda now: {})
        except OSError as error:  # a group that is sampled again overwrites its file
            log.warning("%d groups that were given up stay on disk: %s", len(names), error)
        else:
            # A group may have been sampled again and written meanwhile.
            await self._finalizer.delete([name for name in names if not self._dispatcher.exists(name)])

    def _drop_stale(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            if not isinstance(group, SpooledGroup):  # its rollouts would have to be read from disk
                self._recorder.dropped(group, {rollout[0].info.id: "stale" for rollout in group.rollouts})
        self.delete(group.id for group in groups)

    async def _load(self, group: SpooledGroup) -> None:
        try:
            loaded = await asyncio.to_thread(group.whole)
        except DamagedError as error:
            if any(other is group for other in self._dispatcher.ready):  # not given up meanwhile
                self.give_up_damaged(group, error)
        else:
            self._dispatcher.ready.replace(group, loaded)

    def _notify(self) -> None:
        if self._dispatcher.ready.rollouts < self._dispatcher.limits.batch_size:
            return

        async def notify() -> None:
            async with self.changed:
                self.changed.notify_all()

        self._notification = asyncio.create_task(notify())

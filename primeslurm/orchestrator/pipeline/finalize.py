"""Stage 3, finalize: filters complete groups and writes them to disk. A group counts only once it is on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator.batching.group_filter import FilterVerdict, GroupFilter
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder

T = TypeVar("T")


class CompleteGroup(NamedTuple):
    """A group whose rollouts are all finished."""

    group: RolloutGroup
    is_scored: bool = False  # Finalized a second time, with the teacher's log-probabilities


class FinalizedGroup(NamedTuple):
    """A group that is on disk (or cannot be written in this attempt), or was rejected."""

    group: RolloutGroup
    rejected: str = ""  # Why no rollout of it is trained, in one word. Empty: it is trained.
    is_scored: bool = False


class GroupFinalizer:
    """Input: complete groups. Output: finalized groups, in the same order.

    `recorder` keeps some of the rollouts that are dropped. `retry_s`: seconds between two attempts to write a group to
    a full file system.
    """

    def __init__(
        self, group_filter: GroupFilter, spool: Spool, recorder: RolloutRecorder, retry_s: float = 1.0
    ) -> None:
        self._filter = group_filter
        self._recorder = recorder
        self._spool = spool
        self._retry_s = retry_s
        # A group of 16 rollouts with routed experts is 1.3 GB. A thread keeps the event loop free of it; one thread
        # keeps writes and deletions in order.
        self._thread = ThreadPoolExecutor(1, "finalizer")

    async def finalize(self, complete: Sequence[CompleteGroup]) -> AsyncIterator[FinalizedGroup]:
        """Filter groups, and write the rest to disk.

        Raise UsageError if the user's algorithm raised an error, after the groups before are on disk.
        """
        verdicts, error = await self._in_thread(lambda: self._judge(complete))
        finalized = [
            FinalizedGroup(each.group, is_scored=True) if verdict is None else self._filtered(each.group, verdict)
            for each, verdict in zip(complete, verdicts, strict=False)
        ]
        written = [each.group for each in finalized if not each.rejected]
        await self._in_thread(lambda: self._spool.put_all(written))
        for each in finalized:
            while each.group.id in self._spool.waiting:
                await asyncio.sleep(self._retry_s)
                await self._in_thread(lambda: self._spool.put(each.group))  # noqa: B023  (called before the next one)
            yield each
        if error is not None:
            raise error

    def _judge(self, complete: Sequence[CompleteGroup]) -> tuple[list[FilterVerdict | None], UsageError | None]:
        """Return the verdicts on groups, None for those that are scored, up to the first error of the algorithm."""
        verdicts: list[FilterVerdict | None] = []
        try:
            for each in complete:
                verdicts.append(None if each.is_scored else self._filter.judge(each.group))
        except UsageError as error:
            return verdicts, error
        return verdicts, None

    def _filtered(self, group: RolloutGroup, verdict: FilterVerdict) -> FinalizedGroup:
        trained = self._filter.note(group, verdict)
        self._recorder.dropped(group, verdict.dropped)
        return FinalizedGroup(group, verdict.rejected) if trained is None else FinalizedGroup(trained)

    async def delete(self, ids: Iterable[str]) -> None:
        """Delete groups from disk, after all writes that began before."""
        names = list(ids)
        await self._in_thread(lambda: self._spool.delete(names))

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

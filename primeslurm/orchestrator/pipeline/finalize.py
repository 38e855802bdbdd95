"""Complete groups on their way to where they count: judged, then put on disk, one after another in a thread.

A group of 16 rollouts with routed experts is 1.3 GB. The event loop, which decides all else, waits for none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from primeslurm.orchestrator.batching.group_filter import GroupFilter
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool

T = TypeVar("T")


class GroupFinalizer:
    """See the module docstring. What is called is called on the event loop, in the order in which groups were added.

    Args:
        admission: judges in the thread, and notes what it found on the event loop.
        spool: puts groups on disk.
        on_kept: called with what of a group is trained, once it is on disk, or never will be.
        on_rejected: called with a group that is not trained, and why, in a word.
        on_scored: called with a group that has the teacher's part, on disk like those that are kept.
        retry_s: between two tries to write a group that the file system did not take.
    """

    def __init__(
        self,
        admission: GroupFilter,
        spool: Spool,
        on_kept: Callable[[RolloutGroup], None],
        on_rejected: Callable[[RolloutGroup, str], None],
        on_scored: Callable[[RolloutGroup], None],
        retry_s: float = 1.0,
    ) -> None:
        self._admission = admission
        self._spool = spool
        self._on_kept = on_kept
        self._on_rejected = on_rejected
        self._on_scored = on_scored
        self._retry_s = retry_s
        self._queue: asyncio.Queue[tuple[RolloutGroup, bool]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "finishing")

    def complete(self, group: RolloutGroup) -> None:
        """Add a group whose rollouts are done."""
        self._queue.put_nowait((group, False))

    def scored(self, group: RolloutGroup) -> None:
        """Add a group that was kept before, with what the teacher said of it."""
        self._queue.put_nowait((group, True))

    def delete(self, ids: Iterable[str]) -> asyncio.Future[None]:
        """Remove groups from disk, after what was begun before. The page cache of a large one takes a while."""
        return asyncio.get_running_loop().run_in_executor(self._thread, self._spool.delete, list(ids))

    async def run(self) -> None:
        """Finish groups until cancelled.

        Raises:
            UsageError: an algorithm of the user's own made an error.
        """
        try:
            while True:
                await self._finish(*await self._queue.get())
        finally:
            self._thread.shutdown(wait=False)

    async def _finish(self, group: RolloutGroup, scored: bool) -> None:
        if scored:
            await self._write(group)
            self._on_scored(group)
            return
        verdict = await self._threaded(self._admission.judge, group)
        kept = self._admission.note(group, verdict)
        if isinstance(kept, str):
            self._on_rejected(group, kept)
            return
        await self._write(kept)
        self._on_kept(kept)

    async def _write(self, group: RolloutGroup) -> None:
        while not await self._threaded(self._spool.put, group) and group.id in self._spool.waiting:
            await asyncio.sleep(self._retry_s)

    async def _threaded(self, function: Callable[[RolloutGroup], T], group: RolloutGroup) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, group)

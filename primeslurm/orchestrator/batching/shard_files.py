"""Ranks' shares of batches as files, where they are not sent: `batches/<attempt>/step_000012/rank_3_of_12.1_of_8`.

A share is written when its rank asks for it first, and is the same file whenever it is asked for again, also by a
restarted trainer, and of a restarted orchestrator, until the step's checkpoint is committed. Within an attempt a step
has one batch; files of other attempts are not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from primeslurm.base import durable, files
from primeslurm.orchestrator.batching.batches import Batches, StepShard
from primeslurm.wire.batches import batch_files
from primeslurm.wire.batches.file_ranges import Part
from primeslurm.wire.link.trainer_link import Answer

log = logging.getLogger(__name__)
T = TypeVar("T")
DIRECTORY = "batches"
WRITERS = 4
"""Files that are written at the same time: what a network file system does with one is far from all that it can."""


class ShardFiles:
    """See the module docstring. All methods are called on the event loop.

    Args:
        run_dir: the run's directory.
        attempt: its number.
        batches: what is written.
        committed: the last step that is.
        retry_s: between two tries to write a file that the file system did not take.
    """

    def __init__(self, run_dir: Path, attempt: int, batches: Batches, committed: int, retry_s: float = 1.0) -> None:
        self._directory = run_dir / DIRECTORY / str(attempt)
        self._batches = batches
        self._committed = committed
        self._retry_s = retry_s
        self._made: dict[StepShard, asyncio.Task[Path | None]] = {}
        self._writers = ThreadPoolExecutor(WRITERS, "share-files")
        self._remover = ThreadPoolExecutor(1, "share-files-removed")

    async def answer(self, share: StepShard, *, unreadable: bool, within_s: float) -> Answer | None:
        """Say where a share is, once it is on disk.

        Args:
            share: that a rank asks for.
            unreadable: the rank could not read its file.
            within_s: who asks waits no longer; what was begun goes on.

        Returns:
            None if there is no such batch (any more).

        Raises:
            OSError: it cannot be written, and the file system is neither full nor read-only.
            UsageError: an algorithm of the user's own made an error.
        """
        task = self._made.get(share)
        if task is None or (unreadable and task.done()):
            task = self._made[share] = asyncio.create_task(self._make(share, check=unreadable))
        done, _ = await asyncio.wait([task], timeout=within_s)
        if not done:
            return Answer("wait")
        if task.exception() is not None or task.result() is None:
            self._made.pop(share, None)
        path = task.result()
        return None if path is None else Answer("file", path=str(path))

    def committed(self, step: int) -> None:
        """Note that no step up to this one is asked for any more."""
        self._committed = max(step, self._committed)
        self._made = {share: task for share, task in self._made.items() if share.step > step}
        self.tidy()

    def tidy(self) -> asyncio.Future[None]:
        """Remove the files of other attempts, and of committed steps. That may take minutes; nobody has to wait."""
        return asyncio.get_running_loop().run_in_executor(self._remover, self._remove)

    def close(self) -> None:
        """Write nothing more."""
        for threads in (self._writers, self._remover):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _make(self, share: StepShard, *, check: bool) -> Path | None:
        path = self._path(share)
        if await self._threaded(lambda: batch_files.is_there(path, whole=check)):
            return path
        parts = await self._batches.serve(share)
        if parts is None:
            return None
        waits = False
        while why := await self._threaded(lambda: durable.write_bulk(path, lambda: _put(path, parts))):
            if not waits:
                log.warning("a share of the batch of step %d waits for the file system: %s", share.step, why)
            waits = True
            await asyncio.sleep(self._retry_s)
        self._batches.handed_over(share)
        return path

    def _path(self, share: StepShard) -> Path:
        step, shard = share
        name = f"rank_{shard.dp_rank}_of_{shard.dp_world}.{shard.cp_rank}_of_{shard.cp_world}"
        return self._directory / f"step_{step:06d}" / name

    def _remove(self) -> None:
        for attempt in files.listing(self._directory.parent):
            if attempt != self._directory:
                files.remove_tree(attempt, ignore_errors=True)
        for step in files.listing(self._directory, "step_*"):
            if int(step.name.removeprefix("step_")) <= self._committed:
                files.remove_tree(step, ignore_errors=True)

    def _threaded(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._writers, function)


def _put(path: Path, parts: Sequence[Part]) -> None:
    durable.make_directory(path.parent)
    batch_files.write(path, parts)

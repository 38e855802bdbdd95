"""Batch shards as files, for `rollout_transport: filesystem`: `batches/<attempt>/step_000012/rank_3_of_12.1_of_8`.

A shard is written when its rank first requests it. Every later request gets the same file, also from a restarted
trainer or orchestrator, until the step's checkpoint is committed. Files of other attempts are not read.
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
from primeslurm.wire.batches.file_ranges import FrameSource
from primeslurm.wire.link.messages import Answer

log = logging.getLogger(__name__)
T = TypeVar("T")
DIRECTORY = "batches"
# Files written at once. A single writer does not saturate a network file system.
WRITERS = 4


class ShardFiles:
    """Writes and removes the files of one attempt. All methods run on the event loop.

    `retry_s`: seconds between two attempts to write to a full file system.
    """

    def __init__(self, run_dir: Path, attempt: int, batches: Batches, committed: int, retry_s: float = 1.0) -> None:
        self._directory = run_dir / DIRECTORY / str(attempt)
        self._batches = batches
        self._committed = committed
        self._retry_s = retry_s
        self._writing: dict[StepShard, asyncio.Task[Path | None]] = {}
        self._writers = ThreadPoolExecutor(WRITERS, "shard-files")
        self._remover = ThreadPoolExecutor(1, "shard-files-removed")

    async def answer(self, shard: StepShard, *, unreadable: bool, within_s: float) -> Answer | None:
        """Return the path of a shard once it is on disk, or "wait" after `within_s`. None: there is no such batch.

        `unreadable`: the rank could not read the file, so its content is checked. Raise OSError if the file cannot be
        written, and the file system is neither full nor read-only, and UsageError if the user's algorithm raised an
        error.
        """
        task = self._writing.get(shard)
        if task is None or (unreadable and task.done()):
            task = self._writing[shard] = asyncio.create_task(self._write(shard, check=unreadable))
        done, _ = await asyncio.wait([task], timeout=within_s)
        if not done:
            return Answer("wait")
        if task.exception() is not None or task.result() is None:
            self._writing.pop(shard, None)
        path = task.result()
        return None if path is None else Answer("file", path=str(path))

    def committed(self, step: int) -> None:
        self._committed = max(step, self._committed)
        self._writing = {shard: task for shard, task in self._writing.items() if shard.step > step}
        self.tidy()

    def tidy(self) -> asyncio.Future[None]:
        """Remove the files of other attempts and of committed steps in a thread, which may take minutes."""
        return asyncio.get_running_loop().run_in_executor(self._remover, self._remove)

    def close(self) -> None:
        for threads in (self._writers, self._remover):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _write(self, shard: StepShard, *, check: bool) -> Path | None:
        path = self._path(shard)
        if await self._in_thread(lambda: batch_files.is_there(path, whole=check)):
            return path
        parts = await self._batches.serve(shard)
        if parts is None:
            return None
        is_waiting = False
        while reason := await self._in_thread(lambda: durable.write_bulk(path, lambda: _put(path, parts))):
            if not is_waiting:  # not at every attempt
                log.warning("a shard of the batch of step %d waits for the file system: %s", shard.step, reason)
            is_waiting = True
            await asyncio.sleep(self._retry_s)
        self._batches.handed_over(shard)
        return path

    def _path(self, shard: StepShard) -> Path:
        step, rank = shard
        name = f"rank_{rank.dp_rank}_of_{rank.dp_world}.{rank.cp_rank}_of_{rank.cp_world}"
        return self._directory / f"step_{step:06d}" / name

    def _remove(self) -> None:
        for attempt in files.listing(self._directory.parent):
            if attempt != self._directory:
                files.remove_tree(attempt, ignore_errors=True)
        for step in files.listing(self._directory, "step_*"):
            if int(step.name.removeprefix("step_")) <= self._committed:
                files.remove_tree(step, ignore_errors=True)

    def _in_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._writers, function)


def _put(path: Path, parts: Sequence[FrameSource]) -> None:
    durable.make_directory(path.parent)
    batch_files.write(path, parts)

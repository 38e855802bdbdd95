"""The progress of a run: what an orchestrator needs to continue exactly where a killed one stopped.

The record is the orchestrator's part of a checkpoint (`orchestrator.bin`), and is kept in `rollouts/progress.bin` for a
restart within the attempt. It names the groups of each step; the spool holds the groups themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.errors import RunError
from primeslurm.orchestrator.dispatch import Dispatcher
from primeslurm.orchestrator.dispatch.curricula import Curricula
from primeslurm.wire.decoding import DamagedError, decode_msgpack
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.weight_transfer.messages import NewPolicy

log = logging.getLogger(__name__)

CHECKPOINT_PART = "orchestrator.bin"
PROGRESS = "rollouts/progress.bin"
# Returns the fields to change, from the record that is on disk
Change = Callable[["RunProgress"], Mapping[str, Any]]


class RunProgress(msgspec.Struct, frozen=True):
    """The record. A new run starts with `RunProgress(attempt=n)`."""

    attempt: int
    next_step: int = 1  # The step whose batch is formed next
    done_step: int = 0  # The last step that the trainer reported
    published: NewPolicy | None = None
    cursors: dict[str, int] = {}  # Next position in each environment's stream
    unfinished: list[tuple[str, int]] = []  # Positions before the cursors whose groups are not finished
    batches: dict[int, list[str]] = {}  # Ids of the groups of each step, until the step is committed
    committed: int = 0  # The last step whose checkpoint is committed
    drawn: dict[str, int] = {}  # Tasks that curricula drew for unfinished groups, by group id
    fresh: dict[str, int] = {}  # Number of unseen examples that curricula drew, by environment
    tasks: dict[str, int] = {}  # Sizes of the tasksets of environments with a curriculum, where known
    outcomes: int = 0  # Bytes of the curricula's file of outcomes that count
    # The algorithm's state before each step's batch, until the step is committed
    memory: dict[int, dict[str, float]] = {}
    returned: list[tuple[str, int]] = []  # Examples that were returned once. See `Examples`.

    @property
    def newest_version(self) -> int:
        """Return the newest policy version; later ones were undone."""
        return self.published.version if self.published else self.done_step

    def save(self, path: Path) -> None:
        """Write the record durably. Raises OSError."""
        durable.make_directory(path.parent)
        durable.write(path, msgspec.msgpack.encode(self))


def restore(run_dir: Path, attempt: int) -> RunProgress:
    """Return the attempt's own progress, else that of the newest whole checkpoint, else that of a new run.

    Raises:
        RunError: The checkpoint has no readable orchestrator part, or this node does not see it.
    """
    try:
        progress = decode_msgpack(files.read_bytes(run_dir / PROGRESS), RunProgress)
        if progress.attempt == attempt:
            return progress
    except (FileNotFoundError, DamagedError):
        pass
    try:
        # The trainer sets damaged checkpoints aside, perhaps at the same time.
        step = checkpoints.newest_whole(run_dir)
    except checkpoints.NotVisibleError as error:
        raise RunError(str(error)) from error
    if step is None:
        return RunProgress(attempt=attempt)
    path = checkpoints.step_dir(run_dir, step) / CHECKPOINT_PART
    try:
        saved = decode_msgpack(files.read_bytes(path), RunProgress)
    except (OSError, DamagedError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    return msgspec.structs.replace(
        saved,
        attempt=attempt,
        next_step=step + 1,
        done_step=step,
        published=None,
        batches={s: groups for s, groups in saved.batches.items() if s <= step},
        memory={s: values for s, values in saved.memory.items() if s <= step + 1},
        committed=step,
    )


class ProgressFile:
    """The record of a running orchestrator. It is on disk before anyone acts on it.

    Writes run in a thread, one after another, because a flush takes milliseconds or longer.
    """

    def __init__(self, path: Path, progress: RunProgress, dispatcher: Dispatcher, curricula: Curricula) -> None:
        self.now = progress
        self._path, self._dispatcher, self._curricula = path, dispatcher, curricula
        self._turn = asyncio.Lock()

    async def record(self, change: Change) -> None:
        """Write a change, then apply it. If this raises OSError, nothing has changed."""
        async with self._turn:
            progress = await self._snapshot(change(self.now))
            await asyncio.to_thread(progress.save, self._path)
            self.now = progress

    async def note(self, change: Change) -> None:
        """Apply a change even if it cannot be written. A restart without it repeats work, and loses nothing."""
        async with self._turn:
            changes = change(self.now)
            progress = await self._snapshot(changes)
            try:
                await asyncio.to_thread(progress.save, self._path)
            except OSError as error:
                log.warning("%s cannot be written: %s", ", ".join(changes), error)
            self.now = progress

    async def save(self, path: Path, before: Callable[[], None]) -> None:
        """Write a copy of the record. Raises OSError.

        Args:
            before: Writes, in a thread, what must be on disk first.
        """
        async with self._turn:
            progress = await self._snapshot({})
            await asyncio.to_thread(before)
            await asyncio.to_thread(progress.save, path)

    async def _snapshot(self, changes: Mapping[str, Any]) -> RunProgress:
        dispatcher, curricula = self._dispatcher, self._curricula
        progress = msgspec.structs.replace(
            self.now,
            cursors=dispatcher.cursors,
            unfinished=dispatcher.unfinished,
            drawn=dispatcher.drawn,
            returned=dispatcher.returned,
            fresh=curricula.fresh,
            tasks=curricula.tasks,
            **changes,
        )
        # The outcomes are on disk before a record counts them. What curricula learn meanwhile does not count yet.
        return msgspec.structs.replace(progress, outcomes=await curricula.flush())

"""How far the run is: what an orchestrator needs to continue exactly where a killed one stopped.

The same record is the orchestrator's part of a checkpoint (`orchestrator.bin`), and is kept in `rollouts/progress.bin`
for a restart within an attempt. Steps name their groups only; the groups themselves are in the spool.
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
from primeslurm.wire.decoding import DamagedError, value
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.weight_transfer.messages import NewPolicy

log = logging.getLogger(__name__)

CHECKPOINT_PART = "orchestrator.bin"
PROGRESS = "rollouts/progress.bin"
Change = Callable[["RunProgress"], Mapping[str, Any]]
"""Says what changes in the record, of what it is once those before are on disk."""


class RunProgress(msgspec.Struct, frozen=True):
    """The record. A new run is `RunProgress(attempt=n)`."""

    attempt: int
    next_step: int = 1
    """The step whose batch is formed next."""
    done_step: int = 0
    """The last step that was reported as trained."""
    published: NewPolicy | None = None
    cursors: dict[str, int] = {}
    unfinished: list[tuple[str, int]] = []
    batches: dict[int, list[str]] = {}
    """Step to the ids of the groups it trains on; kept until the step is committed."""
    committed: int = 0
    """The last step whose checkpoint the trainer announced as committed."""
    drawn: dict[str, int] = {}
    """Tasks that curricula drew for unfinished groups, by group id."""
    fresh: dict[str, int] = {}
    """How many unseen examples curricula drew, by environment."""
    tasks: dict[str, int] = {}
    """How many there are, by environment with a curriculum, as far as that is known."""
    outcomes: int = 0
    """Bytes of the curricula's file that count."""
    memory: dict[int, dict[str, float]] = {}
    """Step to what the algorithm knew before its batch; kept until the step is committed. None: it knew nothing."""
    returned: list[tuple[str, int]] = []
    """Examples that were given up once, and are not again."""

    @property
    def newest_version(self) -> int:
        """Return the newest policy version there is: what is newer was undone."""
        return self.published.version if self.published else self.done_step

    def save(self, path: Path) -> None:
        """Write the record, on disk when this returns. Raises OSError."""
        durable.make_directory(path.parent)
        durable.write(path, msgspec.msgpack.encode(self))


def restore(run_dir: Path, attempt: int) -> RunProgress:
    """Find where to continue: in this attempt's own progress, else from the newest checkpoint, else from the start.

    The newest one that looks whole: the trainer sets those aside that do not, perhaps at the same time.

    Raises:
        RunError: that checkpoint has no readable orchestrator part, or this node does not see it.
    """
    try:
        progress = value(files.read_bytes(run_dir / PROGRESS), RunProgress)
        if progress.attempt == attempt:
            return progress
    except (FileNotFoundError, DamagedError):
        pass
    try:
        step = checkpoints.newest_whole(run_dir)
    except checkpoints.NotVisibleError as error:
        raise RunError(str(error)) from error
    if step is None:
        return RunProgress(attempt=attempt)
    path = checkpoints.step_dir(run_dir, step) / CHECKPOINT_PART
    try:
        saved = value(files.read_bytes(path), RunProgress)
    except (OSError, DamagedError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    return msgspec.structs.replace(
        saved,
        attempt=attempt,
        next_step=step + 1,
        done_step=step,
        published=None,
        batches={s: groups for s, groups in saved.batches.items() if s <= step},
        memory={s: known for s, known in saved.memory.items() if s <= step + 1},
        committed=step,
    )


class ProgressFile:
    """The record of a running orchestrator: on disk before anybody is told what follows from it.

    It is written in a thread, as flushes take milliseconds and more, and so is what it relies on, before it. One is
    written after another: the newest stays.

    Args:
        path: of the file.
        progress: where it continues.
        dispatch: whose positions go into every record.
        curricula: which are put on disk first.
    """

    def __init__(self, path: Path, progress: RunProgress, dispatch: Dispatcher, curricula: Curricula) -> None:
        self.now = progress
        self._path, self._dispatch, self._curricula = path, dispatch, curricula
        self._turn = asyncio.Lock()

    async def record(self, change: Change) -> None:
        """Put a change on disk, and only then make it. Raises OSError, and nothing has changed then."""
        async with self._turn:
            progress = await self._snapshot(change(self.now))
            await asyncio.to_thread(progress.save, self._path)
            self.now = progress

    async def note(self, change: Change) -> None:
        """Make a change even if the disk is full: a restart that does not know it repeats work, and loses nothing."""
        async with self._turn:
            changes = change(self.now)
            progress = await self._snapshot(changes)
            try:
                await asyncio.to_thread(progress.save, self._path)
            except OSError as error:
                log.warning("%s is not on disk: %s", ", ".join(changes), error)
            self.now = progress

    async def save(self, path: Path, before: Callable[[], None]) -> None:
        """Put the record somewhere else, too, as it is once those before are on disk. Raises OSError.

        Args:
            path: of that file.
            before: puts on disk what has to be there first, in a thread.
        """
        async with self._turn:
            progress = await self._snapshot({})
            await asyncio.to_thread(before)
            await asyncio.to_thread(progress.save, path)

    async def _snapshot(self, changes: Mapping[str, Any]) -> RunProgress:
        """The record with changes and the dispatcher's present positions, once what curricula have learned is on disk.

        What they learn while that is written does not count in it.
        """
        dispatch, curricula = self._dispatch, self._curricula
        progress = msgspec.structs.replace(
            self.now,
            cursors=dispatch.cursors,
            unfinished=dispatch.unfinished,
            drawn=dispatch.drawn,
            returned=dispatch.returned,
            fresh=curricula.fresh,
            tasks=curricula.tasks,
            **changes,
        )
        return msgspec.structs.replace(progress, outcomes=await curricula.flush())

"""The progress of a run: what an orchestrator needs to continue exactly where a killed one stopped.

The record is the orchestrator's part of a checkpoint (`orchestrator.bin`), and is kept in `rollouts/progress.bin` for a
restart within the attempt. It names the groups of each step; the spool holds the groups themselves. `recover` rebuilds
the dispatcher from both, alike for a new run, a resumed attempt and a restarted process.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.errors import RunError
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits, group_id
from primeslurm.orchestrator.dispatch.curricula import Curricula
from primeslurm.orchestrator.dispatch.examples import Examples, Position
from primeslurm.orchestrator.rollouts.cache_salt import attempt_prefix
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.recipe import Recipe
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

    Raise RunError if the checkpoint has no readable orchestrator part, or this node does not see it.
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
        """Write a copy of the record. Raises OSError. `before`: writes, in a thread, what must be on disk first."""
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


def recover(
    recipe: Recipe,
    arguments: OrchestratorArguments,
    progress: RunProgress,
    spool: Spool,
    batches: Batches,
    curricula: Curricula,
    guilty: Collection[Position] = (),
) -> tuple[Dispatcher, list[str]]:
    """Fill `batches` with what the trainer may still request, and a new dispatcher with the groups that are fresh.

    Deletes the groups of committed steps. Examples that are `guilty` of killing workers are not sampled again. Return
    the dispatcher, and the groups to delete once it is recorded that their examples are sampled again. These are too
    old, damaged, or have tokens of a policy that is newer than the one the run resumes from.
    """
    dispatcher = Dispatcher(
        limits(recipe),
        routers=arguments.routers,
        salt_prefix=attempt_prefix(arguments.run_id, arguments.attempt),
        incarnation=uuid.uuid4().hex[:6],
        step=progress.next_step,
        examples=examples(recipe, progress, curricula, guilty),
    )
    committed = checkpoints.newest(arguments.run_dir) or 0
    needed = [name for step, ids in progress.batches.items() if step > committed for name in ids]
    groups = {group.id: group for group in spool.load(needed)}
    usable = {group.id for group in groups.values() if recipe.teacher is None or group.scored}
    for step, ids in sorted(progress.batches.items()):
        of_step = [groups.pop(name) for name in ids if name in groups]
        if step <= committed:
            spool.delete(ids)
        elif usable.issuperset(ids):
            batches.add(step, of_step, progress.memory.get(step, {}))
        else:
            lost = len(set(ids) - usable)
            log.error("%d groups of step %d are lost: its batch cannot be served again", lost, step)
    outdated = []
    for name, group in groups.items():
        add = dispatcher.add_ready if name in usable else dispatcher.add_unscored
        is_undone = group.newest_version > progress.newest_version
        if not is_undone:
            curricula.learn(group)  # the outcome counts even if the group is too old to train
        if is_undone or not add(group):
            outdated.append(name)
    in_batches = {name.replace("/", "_") for ids in progress.batches.values() for name in ids}
    for name in spool.damaged.keys() - in_batches:
        dispatcher.give_up_damaged(name)
        outdated.append(name)
    return dispatcher, outdated


def examples(
    recipe: Recipe, progress: RunProgress, curricula: Curricula, guilty: Collection[Position] = ()
) -> Examples:
    """Return the streams of examples at the position of a run's progress."""
    in_batches = {name for ids in progress.batches.values() for name in ids}
    return Examples(
        _ratios(recipe),
        cursors=progress.cursors,
        unfinished=progress.unfinished,
        taken=in_batches | {group_id(*position) for position in guilty},
        curricula=curricula,
        drawn=progress.drawn,
        returned=progress.returned,
    )


def limits(recipe: Recipe) -> DispatchLimits:
    """Return the recipe's fields about dispatch."""
    options = recipe.orchestrator
    return DispatchLimits(
        group_sizes={environment.label: recipe.group_size(environment) for environment in recipe.environments},
        batch_size=options.batch_size,
        max_inflight=recipe.max_inflight,
        max_off_policy_steps=options.max_off_policy_steps,
        max_steps=recipe.max_steps,
        ratios=_ratios(recipe),
        oversampling=options.oversampling,
        staleness=options.staleness,
    )


def _ratios(recipe: Recipe) -> dict[str, float]:
    return {environment.label: environment.ratio for environment in recipe.environments}

"""Rebuilds the dispatcher from disk, alike for a new run, a resumed attempt and a restarted process."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits, group_id
from primeslurm.orchestrator.dispatch.curricula import Curricula
from primeslurm.orchestrator.dispatch.examples import Draws, Examples, Position
from primeslurm.orchestrator.pipeline.progress import RunProgress
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.recipe import Recipe
from primeslurm.wire.stored import checkpoints

log = logging.getLogger(__name__)


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

    Deletes the groups of committed steps. Examples that are `guilty` of killing workers are not sampled again.

    Returns:
        The dispatcher, and the groups to delete once it is recorded that their examples are sampled again. These are
        too old, damaged, or have tokens of a policy that is newer than the one the run resumes from.
    """
    dispatcher = Dispatcher(
        limits(recipe),
        routers=arguments.routers,
        salt=f"{arguments.run_id}.{arguments.attempt}",
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


def examples(recipe: Recipe, progress: RunProgress, draws: Draws, guilty: Collection[Position] = ()) -> Examples:
    """Return the streams of examples at the position of a run's progress."""
    in_batches = {name for ids in progress.batches.values() for name in ids}
    return Examples(
        _ratios(recipe),
        cursors=progress.cursors,
        unfinished=progress.unfinished,
        taken=in_batches | {group_id(*position) for position in guilty},
        draws=draws,
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

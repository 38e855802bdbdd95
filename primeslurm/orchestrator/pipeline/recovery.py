"""From what is on disk to a dispatcher that continues: a new run, a resumed attempt and a restarted process alike."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits
from primeslurm.orchestrator.dispatch.curricula import Curricula
from primeslurm.orchestrator.dispatch.examples import Draws, Examples, Position
from primeslurm.orchestrator.dispatch.group_queues import group_id
from primeslurm.orchestrator.pipeline.progress import RunProgress
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
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
    """Fill `batches` with what the trainer may still ask for, and the dispatcher with the groups that are still fresh.

    Groups without the teacher's part wait for it. Deleted from the spool are groups of committed steps. Examples that
    are `guilty` of killing workers are not sampled again.

    Returns:
        The dispatcher; and which groups are to be deleted when it is on record that their examples come again: those
        that are too old or damaged, and those with tokens of a policy newer than the one we resume from, as the step
        that made it was undone.
    """
    dispatch = Dispatcher(
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
    ready = {group.id for group in groups.values() if recipe.teacher is None or group.scored}
    _recover_batches(committed, progress, groups, ready, spool, batches)
    gone = []
    for name, group in groups.items():
        add = dispatch.add_ready if name in ready else dispatch.add_unscored
        undone = group.newest_version > progress.newest_version
        if not undone:
            curricula.learn(group)  # also of one that has become too old
        if undone or not add(group):
            gone.append(name)
    in_batches = {name.replace("/", "_") for ids in progress.batches.values() for name in ids}
    for name in spool.damaged.keys() - in_batches:
        dispatch.unreadable(name)
        gone.append(name)
    return dispatch, gone


def examples(recipe: Recipe, progress: RunProgress, draws: Draws, guilty: Collection[Position] = ()) -> Examples:
    """Go on with the examples of each environment where a run's progress is; none of a known batch comes again."""
    return Examples(
        _ratios(recipe),
        cursors=progress.cursors,
        unfinished=progress.unfinished,
        taken={name for ids in progress.batches.values() for name in ids} | {group_id(*each) for each in guilty},
        draws=draws,
        drawn=progress.drawn,
        returned=progress.returned,
    )


def _ratios(recipe: Recipe) -> dict[str, float]:
    return {environment.label: environment.ratio for environment in recipe.environments}


def limits(recipe: Recipe) -> DispatchLimits:
    """Take what a recipe says about dispatch."""
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


def _recover_batches(
    committed: int,
    progress: RunProgress,
    groups: dict[str, RolloutGroup],
    ready: set[str],
    spool: Spool,
    batches: Batches,
) -> None:
    """Takes the groups of known batches out of `groups`; they must be among those that are `ready`."""
    for step, ids in sorted(progress.batches.items()):
        found = [groups.pop(name) for name in ids if name in groups]
        if step <= committed:
            spool.delete(ids)
        elif ready.issuperset(ids):
            batches.add(step, found, progress.memory.get(step, {}))
        else:
            lost = len(set(ids) - ready)
            log.error("%d groups of step %d are lost: its batch cannot be given again", lost, step)

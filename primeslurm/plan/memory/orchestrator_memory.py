"""What the orchestrator has of rollouts in the memory of the head node. Pure."""

from __future__ import annotations

from primeslurm.base import units
from primeslurm.plan.forecast import Quantity
from primeslurm.recipe import Recipe

BUFFERED = "buffered rollouts"
"""Name of the amount."""
ROLLOUT_BYTES = 13
"""Of a token of a rollout, but for routed experts: id, mask, log-probability, policy version."""
TEACHER_BYTES = 4
"""Of a token beside them, where a teacher is asked about it."""
TRAINED_BATCHES = 2
"""That the trainer may ask for again: the one that it trains, and the one before or, ahead of its time, after it."""
BATCHES_AHEAD = 2
"""Of complete groups that wait for the trainer, as long as others are opened."""


def buffered_rollouts(recipe: Recipe) -> int:
    """Count the rollouts that are in memory at most.

    Those that are done wait for the others of their group, or with their group for a batch. A group opens only if the
    batch that it will be in, behind all that is open or complete, may still hold its version: that bounds them, and
    where few rollouts are in flight, that each open group has one of these. `mask` has no such bound for groups that
    are too old already, and was seen to hold a tenth more.
    """
    asked = recipe.orchestrator
    fresh = (asked.max_off_policy_steps + 1) * asked.batch_size
    largest = max(recipe.group_size(environment) for environment in recipe.environments)
    waiting = min(fresh, BATCHES_AHEAD * asked.batch_size + recipe.max_inflight * largest)
    return waiting + TRAINED_BATCHES * asked.batch_size


def orchestrator_memory(recipe: Recipe, routed_bytes: int, encoded_bytes: int, typical: int) -> Quantity:
    """Say what they take if all of them are as long as they may be.

    Args:
        recipe: of an RL run.
        routed_bytes: of a token's routed experts, where the trainer replays them.
        encoded_bytes: of a token in a batch that is sent, beside these.
        typical: a typical rollout is so much shorter than the longest.
    """
    per_token = ROLLOUT_BYTES + routed_bytes + (TEACHER_BYTES if recipe.teacher else 0)
    rollouts = buffered_rollouts(recipe)
    size = per_token * rollouts * recipe.seq_len
    if recipe.orchestrator.rollout_transport == "zmq":
        size += encoded_bytes * TRAINED_BATCHES * recipe.orchestrator.batch_size * recipe.seq_len
    how = f"{rollouts} rollouts of seq_len, {per_token} bytes per token; "
    how += f"{units.size(size / typical)} if they have 1/{typical} of it"
    return Quantity(name=BUFFERED, value=round(size / 1e9, 1), unit="GB", how=how)

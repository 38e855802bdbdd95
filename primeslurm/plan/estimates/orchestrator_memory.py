"""Host memory of the head node that the orchestrator needs for rollouts. Pure."""

from __future__ import annotations

from primeslurm.base import units
from primeslurm.plan.forecast import Quantity
from primeslurm.recipe import Recipe

# Name of the quantity
BUFFERED = "buffered rollouts"
# Bytes per token of a rollout without routed experts: id, mask, log-probability, policy version
ROLLOUT_BYTES = 13
# Additional bytes per token of a teacher's log-probability
TEACHER_BYTES = 4
# The same of a transcript: text of about four bytes per token, compressed, and the text of each different token
TRANSCRIPT_BYTES = 3
# Batches that the trainer may fetch again: the current one and one neighbour
TRAINED_BATCHES = 2
# Batches of complete groups that wait for the trainer while other groups are open
BATCHES_AHEAD = 2


def buffered_rollouts(recipe: Recipe) -> int:
    # A finished rollout waits for its group, and a group waits for a batch. A group opens only if the batch it will
    # join, behind all open and complete groups, can still use its version. That bounds them. If few rollouts are in
    # flight, each open group has at least one of them in flight, which bounds them, too. `mask` does not bound groups
    # that are already too old. It was seen to hold a tenth more.
    settings = recipe.orchestrator
    fresh = (settings.max_off_policy_steps + 1) * settings.batch_size
    largest = max(recipe.group_size(environment) for environment in recipe.environments)
    waiting = min(fresh, BATCHES_AHEAD * settings.batch_size + recipe.max_inflight * largest)
    return waiting + TRAINED_BATCHES * settings.batch_size


def orchestrator_memory(recipe: Recipe, routed_bytes: int, encoded_bytes: int, typical: int) -> Quantity:
    """Return the memory of buffered rollouts if all of them have the longest length.

    Args:
        routed_bytes: bytes per token of routed experts that the trainer replays.
        encoded_bytes: other bytes per token of an encoded batch.
        typical: ratio of the longest to a typical length.
    """
    per_token = ROLLOUT_BYTES + routed_bytes + (TEACHER_BYTES if recipe.teacher else 0)
    per_token += TRANSCRIPT_BYTES if recipe.monitor.rollouts.per_step else 0
    rollouts = buffered_rollouts(recipe)
    size = per_token * rollouts * recipe.seq_len
    if recipe.orchestrator.rollout_transport == "zmq":
        size += encoded_bytes * TRAINED_BATCHES * recipe.orchestrator.batch_size * recipe.seq_len
    how = f"{rollouts} rollouts of seq_len, {per_token} bytes per token; "
    how += f"{units.size(size / typical)} at 1/{typical} of seq_len"
    return Quantity(name=BUFFERED, value=round(size / 1e9, 1), unit="GB", how=how)

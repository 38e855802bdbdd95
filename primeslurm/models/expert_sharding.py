"""How FSDP splits the stacks of a layer's experts over ranks: one rule, which the trainer follows and checks foresee.

Expert parallelism gives each rank some experts. FSDP splits their stacks, [experts, ...], over the ranks that hold the
same ones: between experts where their number allows, and through every expert where it does not.
"""

from __future__ import annotations

from primeslurm.models.family import Capabilities
from primeslurm.models.registry import capabilities, family_of
from primeslurm.models.shape import ModelShape
from primeslurm.nn.expert_splits import split_dimension, whole_blocks


def shards_have_whole_blocks(shape: ModelShape, ranks: int, ep: int, block: int) -> bool:
    """Whether shards of all stacks of a model's experts have whole blocks of block x block.

    Args:
        shape: the model's.
        ranks: that a copy of the model is spread over.
        ep: how many of them share the experts; a divisor of their number.
        block: rows, and columns.
    """
    if shape.experts is None or shape.experts.count % ep:
        return False
    stacks = [(shape.experts.count // ep, *size) for size in _sizes(shape, None) if len(size) == 2]
    return all(whole_blocks(stack, split_dimension(stack, ranks // ep) or 0, ranks // ep, block) for stack in stacks)


def unshardable_stack(
    shape: ModelShape, impl: str, ranks: int, ep: int, adapters: int | None = None
) -> tuple[int, ...] | None:
    """Find a stack of a model's experts that cannot be split.

    Args:
        shape: the model's.
        impl: whose code it is, as `model.impl` says it.
        ranks: that a copy of the model is spread over.
        ep: how many of them share the experts; a divisor of their number.
        adapters: rank of those that experts have, if they have some.

    Returns:
        What the ranks that hold the same experts have of it, [experts, ...]; None if everything can be split.
    """
    able = capabilities(shape.model_type, impl)
    if shape.experts is None or able is None or _fills_up(shape, able, ep):
        return None
    parts = ((shape.experts.count // ep, *size) for size in _sizes(shape, adapters))
    return next((part for part in parts if split_dimension(part, ranks // ep) is None), None)


def _fills_up(shape: ModelShape, able: Capabilities, ep: int) -> bool:
    """Whether some ranks may have fewer experts than others: without EP, where stacks stay whole in checkpoints."""
    family = family_of(shape.model_type)
    return ep == 1 and (not able.ep or (family is not None and family.traits.expert_stacks))


def _sizes(shape: ModelShape, adapters: int | None) -> list[tuple[int, ...]]:
    """What there is of an expert: matrices to its width and back, and their biases or adapters."""
    assert shape.experts is not None
    inside, width = shape.experts.latent or shape.hidden, shape.experts.width
    if not shape.expert_bias:
        return [(width, inside), (inside, width), *([(inside, adapters), (width, adapters)] if adapters else [])]
    return [(2 * width, inside), (2 * width,), (inside, width), (inside,)]  # gate and up are one matrix

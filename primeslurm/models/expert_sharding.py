"""Checks of how FSDP will shard the stacks of a model's experts. `nn.expert_splits` has the rule."""

from __future__ import annotations

from primeslurm.models.family import Capabilities
from primeslurm.models.registry import capabilities, family_of
from primeslurm.models.shape import ModelShape
from primeslurm.nn.expert_splits import split_dimension, whole_blocks


def shards_have_whole_blocks(shape: ModelShape, ranks: int, ep: int, block: int) -> bool:
    """Return whether all shards of a model's expert stacks consist of whole blocks of block x block weights.

    `ranks` hold one copy of the model, and share the experts by expert parallelism of degree `ep`.
    """
    if shape.experts is None or shape.experts.count % ep:
        return False
    stacks = [(shape.experts.count // ep, *size) for size in _tensor_sizes(shape, None) if len(size) == 2]
    return all(whole_blocks(stack, split_dimension(stack, ranks // ep) or 0, ranks // ep, block) for stack in stacks)


def unshardable_stack(
    shape: ModelShape, impl: str, ranks: int, ep: int, adapters: int | None = None
) -> tuple[int, ...] | None:
    """Return the size [experts, ...] of a stack that ranks / ep ranks cannot share evenly, or None.

    `impl` is the recipe's `model.impl`, `adapters` the LoRA rank of the experts. `ranks` and `ep` are as in
    `shards_have_whole_blocks`; `ep` has to divide the number of experts.
    """
    supported = capabilities(shape.model_type, impl)
    if shape.experts is None or supported is None or _may_pad(shape, supported, ep):
        return None
    stacks = ((shape.experts.count // ep, *size) for size in _tensor_sizes(shape, adapters))
    return next((stack for stack in stacks if split_dimension(stack, ranks // ep) is None), None)


def _may_pad(shape: ModelShape, supported: Capabilities, ep: int) -> bool:
    # FSDP pads an uneven first dimension. Only adapters that keep whole stacks can read such shards.
    family = family_of(shape.model_type)
    return ep == 1 and (not supported.ep or (family is not None and family.traits.expert_stacks))


def _tensor_sizes(shape: ModelShape, adapters: int | None) -> list[tuple[int, ...]]:
    """Return the sizes of one expert's matrices, biases and adapters."""
    assert shape.experts is not None
    inner, width = shape.experts.latent or shape.hidden, shape.experts.width
    if shape.expert_bias:
        return [(2 * width, inner), (2 * width,), (inner, width), (inner,)]  # gate and up are one matrix
    return [(width, inner), (inner, width), *([(inner, adapters), (width, adapters)] if adapters else [])]

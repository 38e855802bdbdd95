"""Weights that arrive in block-scaled FP8, for engines that do not hold them so."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from primeslurm.inference.weight_transfer.errors import PolicyError, some
from primeslurm.wire.weight_transfer.tensor_names import FP8_BLOCK, FP8_SCALE

_ELEMENTS_AT_ONCE = 2**25
"""How much of a stack of FP8 weights is in float32 at a time."""


def dequantised(tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights in block-scaled FP8 as weights of `dtype`; all else as it is.

    Raises:
        PolicyError: a weight came without its scales, or scales without their weight.
    """
    alone: dict[str, torch.Tensor] = {}  # weights and scales whose other half has not come yet
    for name, tensor in tensors:
        weight = name.removesuffix(FP8_SCALE)
        if weight == name and tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
        elif (other := alone.pop(weight, None)) is None:
            alone[weight] = tensor
        else:
            pair = (other, tensor) if weight != name else (tensor, other)
            yield weight, _unscaled(*pair, dtype)
    if alone:
        raise PolicyError(f"FP8 weights and their scales do not match: {some(set(alone))}")


def _unscaled(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of a matrix, or of a stack of them; some at a time, as engines have little memory to spare."""
    rows, columns = weight.shape[-2:]
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    at_once = max(1, _ELEMENTS_AT_ONCE // (rows * columns))
    stacks = (tensor.view(-1, *tensor.shape[-2:]).split(at_once) for tensor in (result, weight, scales))
    for target, data, scale in zip(*stacks, strict=True):
        wide = scale.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
        target.copy_(data.float() * wide[..., :rows, :columns])
    return result

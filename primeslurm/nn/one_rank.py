"""Mixed precision of a small model that one rank holds alone, without FSDP.

FSDP2's hooks cost the host milliseconds per layer, which is most of a small model's step. One rank has nothing to
gather: it computes with copies of the weights in the compute dtype, and adds their gradients to those of the weights.
Weights stay distributed tensors, so that optimizers, checkpoints and exports treat all numbers of ranks alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from primeslurm.nn.block_sizes import ONE_RANK_COPY_BYTES


def replaces_fsdp(model: nn.Module, mesh: Any, dtype: torch.dtype, cpu_offload: bool = False) -> bool:
    """Return whether a model is on one rank, and small enough to keep copies of all its weights in `dtype`."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    return bool(mesh.size() == 1) and not cpu_offload and weights * dtype.itemsize <= ONE_RANK_COPY_BYTES


def install(model: nn.Module, mesh: Any, dtype: torch.dtype) -> None:
    """Make the weights of a model distributed tensors, and compute with copies of them in `dtype`."""
    distributed = {parameter: _distributed(parameter, mesh) for parameter in model.parameters()}
    for module in model.modules():
        module._parameters.update({n: distributed[p] for n, p in module._parameters.items() if p is not None})
    model.register_forward_pre_hook(_Copies(dtype).refresh)


def _distributed(parameter: nn.Parameter, mesh: Any) -> nn.Parameter:
    shards = DTensor.from_local(parameter.detach(), mesh, [Shard(0)] * mesh.ndim, run_check=False)
    return nn.Parameter(shards, parameter.requires_grad)


class _Copies:
    """Copies of a model's weights in the compute dtype, set as module attributes, which precede parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weights: list[Any] = []
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def refresh(self, model: nn.Module, _: Any) -> None:
        """Copy the current weights to the copies, before the next forward and backward pass."""
        if not self._weights:
            self._allocate(model)
        # A second forward pass before the backward pass of the first copies the same values.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self._copies)):
            torch._foreach_copy_(self._copies, [weight.to_local() for weight in self._weights])

    def _allocate(self, model: nn.Module) -> None:
        # Now, because a model's weights are allocated, loaded and tied after they are distributed.
        copies = {weight: self._copy(weight) for weight in model.parameters()}
        self._weights, self._copies = list(copies), list(copies.values())
        for module in model.modules():
            vars(module).update({n: copies[p] for n, p in module._parameters.items() if p is not None})

    def _copy(self, weight: Any) -> torch.Tensor:
        copy = nn.Parameter(torch.empty_like(weight.to_local(), dtype=self._dtype), weight.requires_grad)
        if copy.requires_grad:
            copy.register_post_accumulate_grad_hook(partial(_add_gradient, weight))
        return copy


def _add_gradient(weight: Any, copy: torch.Tensor) -> None:
    """Move the gradient of a copy to the weight, in the weight's dtype."""
    assert copy.grad is not None
    gradient, copy.grad = copy.grad.to(weight.dtype), None
    if weight.grad is None:
        weight.grad = DTensor(gradient, weight._spec, requires_grad=False)
    else:
        weight.grad.to_local().add_(gradient)

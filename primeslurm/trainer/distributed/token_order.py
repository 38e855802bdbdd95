"""Tokens on their way to experts and back, in orders of which both directions are known.

torchtitan's dispatcher gathers rows by index. Autograd does not know that the indices are a permutation, so its
backward pass adds rows up at their places: it clears them, sorts the indices, and adds one row at a time. So does the
sum over each token's experts. Whoever has a permutation's inverse gathers in both directions, and sums a token's rows
side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.token_dispatcher import (
    AllToAllDispatchMetadata,
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
)

from primeslurm.trainer import compat
from primeslurm.trainer.assembly.draft import ModelDraft


class _Copies(torch.autograd.Function):
    """Row i of the result is row `order[i] // copies`; `inverse` says where each copy of a row went."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[order if copies == 1 else order // copies]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        back = grad[inverse]
        if ctx.copies > 1:
            back = back.unflatten(0, (-1, ctx.copies)).sum(1)
        return back, None, None, None


def permuted(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """Gather rows in an order, each of them `copies` times.

    Args:
        rows: [rows, dim].
        order: [rows * copies], a permutation: i // copies is row i's.
        inverse: its inverse.
        copies: of each row.

    Returns:
        [rows * copies, dim].
    """
    result: torch.Tensor = _Copies.apply(rows, order, inverse, copies)
    return result


def inverted(order: torch.Tensor, count: int) -> torch.Tensor:
    """Return the inverse of a permutation of `count`, which is its length; a compiler may not know that."""
    return order.new_empty(count).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


class Dispatcher(AllToAllTokenDispatcher):
    """torchtitan's, which knows that tokens are in permuted order."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """As AllToAllTokenDispatcher's."""

    def _local_reorder(
        self, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort copies of tokens by expert. Also returns their order, and scores as they are: `combine` wants these."""
        order = torch.argsort(topk_expert_ids_TK.view(-1), stable=True)
        return permuted(x_TD, order, inverted(order, order.shape[0]), self.top_k), order, topk_scores_TK

    def _permute(self, routed_input_RD: torch.Tensor, num_global_tokens_per_local_expert_E: torch.Tensor) -> Any:
        with torch.no_grad():
            thin = routed_input_RD.new_empty(routed_input_RD.shape[0], 1)
            _, _, order, counts = super()._permute(thin, num_global_tokens_per_local_expert_E)
        inverse = inverted(order, routed_input_RD.shape[0])
        return routed_input_RD.shape, permuted(routed_input_RD, order, inverse), order, counts

    def _unpermute(self, routed_output_RD: torch.Tensor, input_shape: Any, permuted_indices: torch.Tensor) -> Any:
        return permuted(routed_output_RD, inverted(permuted_indices, input_shape[0]), permuted_indices)

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: LocalDispatchMetadata, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """Bring experts' outputs [rows, dim] back, and sum those of each token by its scores, in float32."""
        if isinstance(metadata, AllToAllDispatchMetadata):
            routed_output_RD = self._unpermute(routed_output_RD, metadata.input_shape, metadata.permuted_indices)
            routed_output_RD = self._combine_token_exchange(
                routed_output_RD, self.ep_mesh.get_group(), metadata.input_splits, metadata.output_splits
            )
        order, scores = metadata.token_indices_experts_sorted_N, metadata.topk_scores_experts_sorted_N
        outputs = permuted(routed_output_RD, inverted(order, order.shape[0]), order).unflatten(0, scores.shape)
        return (outputs.float() * scores.unsqueeze(-1)).sum(1).to(x_TD.dtype)


def convert(draft: ModelDraft) -> None:
    """Have tokens of every layer with experts travel like this, unless another backend takes them there.

    On CPUs compiled layers keep torchtitan's way: there, expert parallelism compiled with this one fails in torch 2.13
    (a device mesh among the tensors that are saved for the backward pass).
    """
    if not draft.recipe.trainer.compile or not compat.ON_CPU:
        compat.swap(draft.config, AllToAllTokenDispatcher, Dispatcher)

"""Products of each head's values with a matrix of its own, written where they are wanted.

Batched products come head by head. What follows wants token by token: einsum's result would be copied into that order,
and its gradient back. Matrix products write rows of any stride, so nothing need be.
"""

from __future__ import annotations

from typing import Any

import torch


def head_products(values: torch.Tensor, matrices: torch.Tensor, appended: torch.Tensor | None = None) -> torch.Tensor:
    """Products [rows, tokens, heads, out], contiguous; with `appended` behind them.

    Args:
        values: [rows, tokens, heads, size].
        matrices: [heads, size, out].
        appended: [rows, tokens, heads, more]: the result is [rows, tokens, heads, out + more].
    """
    result: torch.Tensor = _HeadProducts.apply(values, matrices, appended)
    return result


class _HeadProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, matrices: torch.Tensor, appended: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(values, matrices)
        ctx.appended = appended is not None
        size = matrices.shape[2]
        result = values.new_empty(*values.shape[:3], size + (appended.shape[3] if appended is not None else 0))
        torch.bmm(_by_head(values), matrices, out=_by_head(result[..., :size]))
        if appended is not None:
            result[..., size:] = appended
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, matrices = ctx.saved_tensors
        mine = _by_head(grad[..., : matrices.shape[2]])
        grad_values = torch.empty_like(values, memory_format=torch.contiguous_format)
        torch.bmm(mine, matrices.mT, out=_by_head(grad_values))
        grad_matrices = _by_head(values).mT @ mine if ctx.needs_input_grad[1] else None
        return grad_values, grad_matrices, grad[..., matrices.shape[2] :] if ctx.appended else None


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """A view of [rows, tokens, heads, size] as [heads, rows x tokens, size]."""
    return tensor.flatten(0, 1).transpose(0, 1)

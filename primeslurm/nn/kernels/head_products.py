"""Per-head matrix products that write their results token by token.

A batched product is ordered by head, but the following layers need the order of tokens. einsum would copy the result
into that order, and the gradient back. Matrix products can write rows with any stride, so no copy is needed.
"""

from __future__ import annotations

from typing import Any

import torch


def head_products(values: torch.Tensor, matrices: torch.Tensor, appended: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each head's values by the head's matrix. Returns [rows, tokens, heads, out (+ more)], contiguous.

    Args:
        values: [rows, tokens, heads, size].
        matrices: [heads, size, out].
        appended: Values to append to the products [rows, tokens, heads, more].
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
        grad_by_head = _by_head(grad[..., : matrices.shape[2]])
        grad_values = torch.empty_like(values, memory_format=torch.contiguous_format)
        torch.bmm(grad_by_head, matrices.mT, out=_by_head(grad_values))
        grad_matrices = _by_head(values).mT @ grad_by_head if ctx.needs_input_grad[1] else None
        return grad_values, grad_matrices, grad[..., matrices.shape[2] :] if ctx.appended else None


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """View [rows, tokens, heads, size] as [heads, rows * tokens, size]."""
    return tensor.flatten(0, 1).transpose(0, 1)

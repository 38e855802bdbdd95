"""Rows that are spread over places and gathered again: how tokens get to experts, and outputs back to tokens.

Each of m rows has as many slots as it may have copies. `where` [m, slots] says which of the n spread rows is its copy
in that slot, -1 for none; `owner` [n] is the other way round: the flat slot (row * slots + slot) that each of the n
belongs to, -1 for a row of zeros that belongs to nobody. As both directions are known, `spread` and `gathered` are each
other's backward pass, nothing is sorted or added up atomically, and a sum over copies is made side by side in float32
without its addends being stored. On GPUs Triton kernels do this (`row_kernel`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op


def spread(rows: torch.Tensor, where: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Copy each row to where its slots say.

    Args:
        rows: [m, dim].
        where: [m, slots].
        owner: [n].

    Returns:
        [n, dim]. A row's gradient is the sum of its copies', in float32.
    """
    return _spread(rows.contiguous(), where, owner)


def gathered(
    rows: torch.Tensor, where: torch.Tensor, owner: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum the rows that belong together, in float32.

    Args:
        rows: [n, dim].
        where: [m, slots].
        owner: [n].
        weights: [m, slots], what each row is multiplied by; 1 if not given. Differentiable.

    Returns:
        [m, dim], in the dtype of the rows; zeros for who has none.
    """
    return _gathered(rows.contiguous(), where, owner, weights)


def _spread_now(rows: torch.Tensor, where: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda:
        from primeslurm.nn.kernels import row_kernel

        return row_kernel.spread(rows, owner, where.shape[1])
    found = rows[(owner // where.shape[1]).clamp(min=0)]
    found[owner < 0] = 0
    return found


def _gathered_now(
    rows: torch.Tensor, where: torch.Tensor, owner: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    if rows.is_cuda:
        from primeslurm.nn.kernels import row_kernel

        return row_kernel.gathered(rows, where, weights)
    total = rows.new_zeros(where.shape[0], rows.shape[1], dtype=_exact(rows.dtype))
    for slot in range(where.shape[1]) if len(rows) else ():
        share = torch.ones_like(total[:, 0]) if weights is None else weights[:, slot].to(total.dtype)
        share = torch.where(where[:, slot] < 0, 0, share)
        total.addcmul_(rows[where[:, slot].clamp(min=0)].to(total.dtype), share[:, None])
    return total.to(rows.dtype)


def _gathered_gradients(
    grad: torch.Tensor, rows: torch.Tensor, owner: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows and of their weights."""
    if rows.is_cuda:
        from primeslurm.nn.kernels import row_kernel

        return row_kernel.gradients(grad, rows, owner, weights)
    exact = _exact(rows.dtype)
    each = _spread_now(grad, weights, owner).to(exact)
    of_weights = weights.new_zeros(weights.numel() + 1)  # the last is nobody's
    of_weights[owner] = (each * rows.to(exact)).sum(-1).to(weights.dtype)
    of_rows = each * weights.flatten()[owner.clamp(min=0), None].to(exact)
    return of_rows.to(rows.dtype), of_weights[:-1].view_as(weights)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# Operators of their own: a compiler need not look inside, nor know how long the results of routing are.
_spread = custom_op("primeslurm::spread", _spread_now, mutates_args=())
_gathered = custom_op("primeslurm::gathered", _gathered_now, mutates_args=())
_gradients = custom_op("primeslurm::gathered_gradients", _gathered_gradients, mutates_args=())


@_spread.register_fake
def _(rows: torch.Tensor, where: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(owner.shape[0], rows.shape[1])


@_gathered.register_fake
def _(rows: torch.Tensor, where: torch.Tensor, owner: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return rows.new_empty(where.shape[0], rows.shape[1])


@_gradients.register_fake
def _(
    grad: torch.Tensor, rows: torch.Tensor, owner: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _save_places(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _spread_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _gathered(grad.contiguous(), *ctx.saved_tensors, None), None, None


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, where, owner, weights = inputs
    # rows are only needed for the gradient of their weights
    ctx.save_for_backward(where, owner, *(() if weights is None else (rows, weights)))


def _gathered_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    where, owner, *weighted = ctx.saved_tensors
    grad = grad.contiguous()
    if not weighted:
        return _spread(grad, where, owner), None, None, None
    rows, weights = weighted
    of_rows, of_weights = _gradients(grad, rows, owner, weights)
    return of_rows, None, None, of_weights


_spread.register_autograd(_spread_backward, setup_context=_save_places)
_gathered.register_autograd(_gathered_backward, setup_context=_save_rows)

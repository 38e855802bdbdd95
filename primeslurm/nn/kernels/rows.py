"""Copy each token row once per expert, sorted by expert, and later sum the experts' results per row.

Each of m rows has a fixed number of slots for copies. `where` [m, slots] is the index of each copy among the n spread
rows, -1 for none. `owner` [n] is the inverse: the flat slot (row * slots + slot) of each spread row, -1 for a padding
row of zeros. With both directions known, `spread` and `gathered` are each other's backward pass. Nothing is sorted or
added atomically, and sums over copies are computed in float32 without storing the terms. GPUs use the Triton kernels of
`row_kernel`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op


def spread(rows: torch.Tensor, where: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Copy rows [m, dim] to [n, dim]. The gradient of a row is the float32 sum of its copies' gradients."""
    return _spread(rows.contiguous(), where, owner)


def gathered(
    rows: torch.Tensor, where: torch.Tensor, owner: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum the copies of each row: [n, dim] to [m, dim], in float32, rounded to the dtype of `rows`.

    `weights` [m, slots] are differentiable factors of the copies. A row without copies becomes zero.
    """
    return _gathered(rows.contiguous(), where, owner, weights)


def _spread_now(rows: torch.Tensor, where: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda:
        from primeslurm.nn.kernels import row_kernel

        return row_kernel.spread(rows, owner, where.shape[1])
    copies = rows[(owner // where.shape[1]).clamp(min=0)]
    copies[owner < 0] = 0
    return copies


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
    if rows.is_cuda:
        from primeslurm.nn.kernels import row_kernel

        return row_kernel.gradients(grad, rows, owner, weights)
    exact = _exact(rows.dtype)
    each = _spread_now(grad, weights, owner).to(exact)
    of_weights = weights.new_zeros(weights.numel() + 1)  # the last entry collects padding rows
    of_weights[owner] = (each * rows.to(exact)).sum(-1).to(weights.dtype)
    of_rows = each * weights.flatten()[owner.clamp(min=0), None].to(exact)
    return of_rows.to(rows.dtype), of_weights[:-1].view_as(weights)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# Custom operators, so that torch.compile neither traces them nor needs the sizes that depend on the routing.
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
    # The rows are needed only for the gradient of the weights.
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

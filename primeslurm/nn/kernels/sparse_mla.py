"""Multi-head latent attention over the keys that an indexer selected, in absorbed form.

Each head's query is projected into the space of the compressed keys, which all heads share, so that attention has one
key and value head. `sparse_mla` reads the selected keys in place (Triton kernels on GPUs) or gathers those of a few
queries at a time. `dense_mla` computes the same from all scores. It is faster for short rows, and quadratic in memory.
Both take

    query    [rows, queries, heads, rank + rope]  absorbed queries, and their rotary part
    keys     [rows, keys, rank + rope]            compressed keys, which are also the values, and their rotary part
    indices  [rows, queries, top_k], int32        selected keys, -1 for none; at least one per query
    rank                                          size of the compressed keys
    scale                                         scale of the scores

and return [rows, queries, heads, rank] in the dtype of the queries. All arguments but the indices get gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.library import custom_op

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]
# Queries whose keys are gathered at once. 128 x 2048 keys x 576 values are 300 MB in bfloat16.
CHUNK = 128


def sparse_mla(query: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """Compute attention over the selected keys. The backward pass recomputes the scores."""
    rows, queries, heads, _ = query.shape
    offset = torch.arange(rows, device=indices.device, dtype=indices.dtype)[:, None, None] * keys.shape[1]
    where = torch.where(indices < 0, indices, indices + offset).flatten(0, 1)
    out, _ = _attend(query.flatten(0, 1), keys.flatten(0, 1), where, rank, scale)
    return out.view(rows, queries, heads, rank)


def dense_mla(query: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """Compute attention with a mask over all keys."""
    shape = (*indices.shape[:2], keys.shape[1] + 1)  # an extra column receives the unselected entries
    slots = torch.where(indices < 0, shape[2] - 1, indices).long()
    selected = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(-1, slots, True)[..., :-1]
    scores = torch.einsum("bqhr,bkr->bhqk", query, keys)
    weights = (scores.float() * scale).masked_fill(~selected[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkr->bqhr", weights.to(keys.dtype), keys[..., :rank])


def _forward(
    query: torch.Tensor, keys: torch.Tensor, where: torch.Tensor, rank: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [queries, heads, rank] and the log-sum-exp of the scores [queries, heads, 1]."""
    if _has_kernel(query, rank):
        from primeslurm.nn.kernels import flash_mla, sparse_mla_kernel

        if flash_mla.fits(query, where, rank):
            return flash_mla.forward(query, keys, where, scale)
        return sparse_mla_kernel.forward(query, keys, where, rank, scale)
    out = query.new_empty(*query.shape[:2], rank)
    normaliser = query.new_empty(*query.shape[:2], 1, dtype=torch.float32)
    for part in _chunks(len(query)):
        gathered, scores = _scores(query[part], keys, where[part], scale)
        normaliser[part] = scores.logsumexp(-1, keepdim=True)
        weights = (scores - normaliser[part]).exp().to(query.dtype)
        out[part] = weights @ gathered[..., :rank]
    return out, normaliser


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    where: torch.Tensor,
    out: torch.Tensor,
    normaliser: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the queries, and of the keys (summed in float32)."""
    rank = grad.shape[-1]
    if _has_kernel(query, rank):
        from primeslurm.nn.kernels import sparse_mla_backward

        return sparse_mla_backward.backward(grad, query, keys, where, out, normaliser, scale)
    grad_query = torch.empty_like(query)
    grad_keys = torch.zeros_like(keys, dtype=torch.float32)
    for part in _chunks(len(query)):
        gathered, scores = _scores(query[part], keys, where[part], scale)
        weights = (scores - normaliser[part]).exp()
        share = grad[part] @ gathered[..., :rank].transpose(1, 2)
        mean = (grad[part].float() * out[part].float()).sum(-1, keepdim=True)
        grad_scores = (weights * (share.float() - mean) * scale).to(query.dtype)
        grad_query[part] = grad_scores @ gathered
        grad_gathered = (grad_scores.transpose(1, 2) @ query[part]).float()
        grad_gathered[..., :rank] += weights.to(query.dtype).transpose(1, 2) @ grad[part]
        grad_keys.index_add_(0, where[part].clamp(min=0).flatten(), grad_gathered.flatten(0, 1))
    return grad_query, grad_keys.to(keys.dtype)


def _has_kernel(query: torch.Tensor, rank: int) -> bool:
    # The Triton kernels need bfloat16 and sizes that are powers of two.
    rope = query.shape[-1] - rank
    powers = rank & (rank - 1) == 0 and rope & (rope - 1) == 0
    return query.is_cuda and query.dtype == torch.bfloat16 and powers and rank >= 32 and rope >= 16


def _chunks(queries: int) -> Iterator[slice]:
    for start in range(0, queries, CHUNK):
        yield slice(start, start + CHUNK)


def _scores(
    query: torch.Tensor, keys: torch.Tensor, where: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return selected keys [queries, top_k, values] and scores [queries, heads, top_k], -inf where there is no key."""
    gathered = keys[where.clamp(min=0)]
    scores = (query @ gathered.transpose(1, 2)).float() * scale
    return gathered, scores.masked_fill_((where < 0)[:, None], float("-inf"))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, keys, where, _, ctx.scale = inputs
    ctx.save_for_backward(query, keys, where, *output)


def _differentiate(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*_attend_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None)


def head_products(values: torch.Tensor, matrices: torch.Tensor, appended: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each head's values [rows, tokens, heads, size] by the head's matrix [heads, size, out].

    Returns [rows, tokens, heads, out + more], contiguous, with `appended` [rows, tokens, heads, more] at the end.
    """
    result: torch.Tensor = _HeadProducts.apply(values, matrices, appended)
    return result


class _HeadProducts(torch.autograd.Function):
    # A batched product is ordered by head, but the following layers need the order of tokens. einsum would copy the
    # result into that order, and the gradient back. Matrix products can write rows with any stride, without a copy.
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


# Custom operators, because selective activation checkpointing would otherwise save the scores of every chunk, which the
# chunks are meant to avoid.
_attend = custom_op("primeslurm::attend_gathered", _forward, mutates_args=())
_attend_backward = custom_op("primeslurm::attend_gathered_backward", _backward, mutates_args=())
_attend.register_autograd(_differentiate, setup_context=_save)

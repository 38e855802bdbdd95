"""The backward pass of attention over selected keys on NVIDIA GPUs: gradients are added up key by key.

It does some queries at a time, in three kernels. The first computes the weights anew, writes them and the scores'
gradients, and adds up the queries' gradients. The second turns both into what each query adds to each key that it
selected, summed over heads, and writes that in the keys' dtype. The third adds up what belongs to a key, in float32 and
always in the same order: gradients are the same in every run. What lies in between takes BUFFER_BYTES. With GLM-5's
shape (64 heads, 2,048 keys of 576 values) in bfloat16, a token writes and reads 2.9 MB once; float32 atomics on the
keys' gradients would read and write 4.7 MB, and take 1.6 times as long on an H200.

Shapes are those of `sparse_mla._forward`: query [queries, heads, rank + rope], keys [keys, rank + rope], where
[queries, selected] int32 with -1 for none. `rank` and `rope` are powers of two, 32 and 16 at least.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from primeslurm.trainer.kernels.sparse_mla_kernel import block_heads, load

BUFFER_BYTES = 4 * 2**30
"""For what the backward pass keeps of some queries: it does as many at a time as fit, and one at least."""
_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((64, 8, 1), (64, 8, 2), (32, 8, 1), (32, 8, 2), (16, 8, 2))
]


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    where: torch.Tensor,
    out: torch.Tensor,
    normaliser: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the queries and, summed in float32, of the keys."""
    grad, query, keys, where = (tensor.contiguous() for tensor in (grad, query, keys, where))
    grad_query = torch.empty_like(query)
    grad_keys = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
    heads, selected = query.shape[1], where.shape[1]
    values = 2 * heads + keys.shape[1] * triton.cdiv(heads, block_heads(heads))
    step = max(1, BUFFER_BYTES // (selected * values * keys.element_size()))
    for start in range(0, len(query), step):
        part = slice(start, start + step)
        mean = (grad[part].float() * out[part].float()).sum(-1)
        weights, slopes = _queries(
            grad[part], query[part], keys, where[part], normaliser[part], mean, grad_query[part], scale
        )
        shares = _shares(grad[part], query[part], weights, slopes)
        _add_up(shares, where[part], grad_keys, grad.shape[-1])
    return grad_query, grad_keys.to(keys.dtype)


def _queries(
    grad: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    where: torch.Tensor,
    normaliser: torch.Tensor,
    mean: torch.Tensor,
    grad_query: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill `grad_query`. Returns weights and gradients of the scores, [queries, heads, selected], 0 for no key."""
    (queries, heads, size), rank, per_program = query.shape, grad.shape[-1], block_heads(query.shape[1])
    weights = query.new_empty(queries, heads, where.shape[1])
    slopes = torch.empty_like(weights)
    _query_kernel[(queries, triton.cdiv(heads, per_program))](
        grad,
        query,
        keys,
        where,
        normaliser,
        mean,
        grad_query,
        weights,
        slopes,
        scale,
        heads,
        where.shape[1],
        HALF=rank // 2,
        ROPE=size - rank,
        BLOCK_HEADS=per_program,
    )
    return weights, slopes


def _shares(grad: torch.Tensor, query: torch.Tensor, weights: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """What each query adds to each of its keys, [blocks of heads, queries, selected, rank + rope]."""
    (queries, heads, size), rank, per_program = query.shape, grad.shape[-1], block_heads(query.shape[1])
    blocks = triton.cdiv(heads, per_program)
    shares = query.new_empty(blocks, queries, weights.shape[2], size)
    _share_kernel[(queries, blocks)](
        grad,
        query,
        weights,
        slopes,
        shares,
        heads,
        weights.shape[2],
        HALF=rank // 2,
        ROPE=size - rank,
        BLOCK_HEADS=per_program,
    )
    return shares


def _add_up(shares: torch.Tensor, where: torch.Tensor, grad_keys: torch.Tensor, rank: int) -> None:
    """Add the shares of each key to its gradient; `where` [queries, selected] says whose they are."""
    keys, size = grad_keys.shape
    owners, order = where.flatten().sort(stable=True)
    ends = torch.searchsorted(owners, torch.arange(keys + 1, dtype=owners.dtype, device=owners.device))
    _sum_kernel[(keys,)](shares, order, ends, grad_keys, shares.shape[0], where.numel(), RANK=rank, ROPE=size - rank)


@triton.jit
def _gather(keys, where, slot, selected, HALF: tl.constexpr, ROPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The keys at some slots of a query whose selection begins at `where`, in three parts; and which slots hold one."""
    index = tl.load(where + slot, mask=slot < selected, other=-1)
    valid = index >= 0
    key = keys + tl.where(valid, index, 0).to(tl.int64) * (2 * HALF + ROPE)
    return load(key, 0, valid, HALF), load(key, HALF, valid, HALF), load(key, 2 * HALF, valid, ROPE), valid


@triton.jit
def _products(low, high, rope, k_low, k_high, k_rope):
    """Scores [heads, slots] of a query's heads and keys, unscaled."""
    scores = tl.dot(low, tl.trans(k_low))
    scores = tl.dot(high, tl.trans(k_high), scores)
    return tl.dot(rope, tl.trans(k_rope), scores)


@triton.autotune(_CONFIGS, key=["HALF", "ROPE", "BLOCK_HEADS", "selected"])
@triton.jit
def _query_kernel(  # type: ignore[no-untyped-def]
    grad,
    query,
    keys,
    where,
    normaliser,
    mean,
    grad_query,
    weights,
    slopes,
    scale,
    heads,
    selected,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = 2 * HALF + ROPE
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    there = head < heads
    place = token * heads + head
    row = query + place * size
    q_low = load(row, 0, there, HALF)
    q_high = load(row, HALF, there, HALF)
    q_rope = load(row, 2 * HALF, there, ROPE)
    row = grad + place * (2 * HALF)
    g_low = load(row, 0, there, HALF)
    g_high = load(row, HALF, there, HALF)
    # weights of padding heads are exp2(0 - inf) = 0
    log_total = tl.load(normaliser + place, mask=there, other=float("inf"))
    delta = tl.load(mean + place, mask=there, other=0.0)
    d_low = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    d_high = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    d_rope = tl.zeros([BLOCK_HEADS, ROPE], tl.float32)
    for start in range(0, selected, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        k_low, k_high, k_rope, valid = _gather(keys, where + token * selected, slot, selected, HALF, ROPE)
        scores = _products(q_low, q_high, q_rope, k_low, k_high, k_rope)
        share = tl.dot(g_low, tl.trans(k_low))
        share = tl.dot(g_high, tl.trans(k_high), share)
        weight = tl.exp2((scores * scale - log_total[:, None]) * 1.4426950408889634)
        weight = tl.where(valid[None, :], weight, 0.0)
        slope = (weight * (share - delta[:, None]) * scale).to(k_low.dtype)
        d_low = tl.dot(slope, k_low, d_low)
        d_high = tl.dot(slope, k_high, d_high)
        d_rope = tl.dot(slope, k_rope, d_rope)
        target = head[:, None] * selected + slot[None, :]
        kept = there[:, None] & (slot < selected)[None, :]
        tl.store(weights + token * heads * selected + target, weight.to(k_low.dtype), mask=kept)
        tl.store(slopes + token * heads * selected + target, slope, mask=kept)
    column = grad_query + place[:, None] * size
    half = tl.arange(0, HALF)[None, :]
    kind = grad_query.dtype.element_ty
    tl.store(column + half, d_low.to(kind), mask=there[:, None])
    tl.store(column + HALF + half, d_high.to(kind), mask=there[:, None])
    tl.store(column + 2 * HALF + tl.arange(0, ROPE)[None, :], d_rope.to(kind), mask=there[:, None])


@triton.autotune(_CONFIGS, key=["HALF", "ROPE", "BLOCK_HEADS", "selected"])
@triton.jit
def _share_kernel(  # type: ignore[no-untyped-def]
    grad,
    query,
    weights,
    slopes,
    shares,
    heads,
    selected,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = 2 * HALF + ROPE
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    there = head < heads
    place = token * heads + head
    row = query + place * size
    q_low = load(row, 0, there, HALF)
    q_high = load(row, HALF, there, HALF)
    q_rope = load(row, 2 * HALF, there, ROPE)
    row = grad + place * (2 * HALF)
    g_low = load(row, 0, there, HALF)
    g_high = load(row, HALF, there, HALF)
    first = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + token) * selected
    half = tl.arange(0, HALF)[None, :]
    kind = shares.dtype.element_ty
    for start in range(0, selected, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        source = place[:, None] * selected + slot[None, :]
        inside = slot < selected
        kept = there[:, None] & inside[None, :]
        weight = tl.trans(tl.load(weights + source, mask=kept, other=0.0))
        slope = tl.trans(tl.load(slopes + source, mask=kept, other=0.0))
        target = shares + (first + slot)[:, None] * size
        part = tl.dot(weight, g_low, tl.dot(slope, q_low))
        tl.store(target + half, part.to(kind), mask=inside[:, None])
        part = tl.dot(weight, g_high, tl.dot(slope, q_high))
        tl.store(target + HALF + half, part.to(kind), mask=inside[:, None])
        part = tl.dot(slope, q_rope)
        tl.store(target + 2 * HALF + tl.arange(0, ROPE)[None, :], part.to(kind), mask=inside[:, None])


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    shares, order, ends, grad_keys, blocks, pairs, RANK: tl.constexpr, ROPE: tl.constexpr
):
    key = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(ends + key), tl.load(ends + key + 1)
    if begin < end:
        rank, rope = tl.arange(0, RANK), tl.arange(0, ROPE)
        target = grad_keys + key * (RANK + ROPE)
        low, high = tl.load(target + rank), tl.load(target + RANK + rope)
        for block in range(blocks):
            for start in range(begin, end, 16):
                slot = start + tl.arange(0, 16)
                there = slot < end
                pair = tl.load(order + slot, mask=there, other=0) + tl.cast(block, tl.int64) * pairs
                row = shares + pair * (RANK + ROPE)
                low += tl.sum(load(row, 0, there, RANK).to(tl.float32), 0)
                high += tl.sum(load(row, RANK, there, ROPE).to(tl.float32), 0)
        tl.store(target + rank, low)
        tl.store(target + RANK + rope, high)

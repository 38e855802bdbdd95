"""Backward pass of `sparse_mla` on NVIDIA GPUs, with deterministic sums per key. Shapes as in `sparse_mla_kernel`.

It processes a group of queries at a time, in four kernels:

1. Recompute the softmax weights, and compute the gradients of the scores.
2. Sum the gradients of the queries.
3. Compute the contribution of each query to each of its keys, summed over heads, in the dtype of the keys.
4. Sum the contributions per key in float32, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from primeslurm.nn.kernels.sparse_mla_kernel import block_heads, load

# Memory for intermediate results. It limits the number of queries per group, which is at least one.
# With GLM-5's shape (64 heads, 2,048 keys of 576 values) in bfloat16, a token writes and reads 2.9 MB once. Float32
# atomics on gradients of the keys would read and write 4.7 MB. Merging kernels 1 and 2 would gather keys only once, but
# one query would take all registers and shared memory of a multiprocessor: 39 instead of 20 ms for 16,384 tokens.
BUFFER_BYTES = 4 * 2**30
# Rows per program of the mean kernel
MEANS = 16
# Columns of queries and keys per matrix product of the scores
COLUMNS = 64
_WEIGHT_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((128, 4, 3), (256, 8, 3), (256, 8, 4), (64, 4, 3))
]
_QUERY_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((64, 8, 2), (64, 8, 3), (32, 8, 3), (16, 4, 3))
]
_SHARE_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((128, 8, 4), (128, 8, 3), (64, 4, 4), (32, 4, 3))
]
# Contributions to a key that are summed at once. Not autotuned, because another number would change the bits.
PAIRS, PAIR_WARPS = 16, 2


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    where: torch.Tensor,
    out: torch.Tensor,
    normaliser: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad, query, keys, where = (tensor.contiguous() for tensor in (grad, query, keys, where))
    grad_query = torch.empty_like(query)
    grad_keys = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
    heads, selected = query.shape[1], where.shape[1]
    values = 2 * heads + keys.shape[1] * triton.cdiv(heads, block_heads(heads))
    step = max(1, BUFFER_BYTES // (selected * values * keys.element_size()))
    for start in range(0, len(query), step):
        part = slice(start, start + step)
        mean = _means(grad[part], out[part])
        weights, slopes = _weights(grad[part], query[part], keys, where[part], normaliser[part], mean, scale)
        _add_queries(slopes, keys, where[part], grad_query[part], grad.shape[-1])
        shares = _shares(grad[part], query[part], weights, slopes)
        _add_up(shares, where[part], grad_keys, grad.shape[-1])
    return grad_query, grad_keys.to(keys.dtype)


def _means(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the mean gradient of the scores [queries, heads] in float32: the output times its gradient."""
    queries, heads, rank = grad.shape
    means = torch.empty(queries, heads, dtype=torch.float32, device=grad.device)
    _mean_kernel[(triton.cdiv(means.numel(), MEANS),)](grad, out, means, means.numel(), RANK=rank, ROWS=MEANS)
    return means


def _weights(
    grad: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    where: torch.Tensor,
    normaliser: torch.Tensor,
    mean: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax weights and gradients of the scores [queries, heads, selected], 0 where there is no key."""
    (queries, heads, size), rank, per_program = query.shape, grad.shape[-1], block_heads(query.shape[1])
    selected = where.shape[1]
    weights = query.new_empty(queries, heads, selected)
    slopes = torch.empty_like(weights)
    _weight_kernel[lambda chosen: (triton.cdiv(selected, chosen["BLOCK"]), triton.cdiv(heads, per_program), queries)](
        grad,
        query,
        keys,
        where,
        normaliser,
        mean,
        weights,
        slopes,
        scale,
        heads,
        selected,
        RANK=rank,
        ROPE=size - rank,
        COLUMNS=min(COLUMNS, rank),
        BLOCK_HEADS=per_program,
    )
    return weights, slopes


def _add_queries(
    slopes: torch.Tensor, keys: torch.Tensor, where: torch.Tensor, grad_query: torch.Tensor, rank: int
) -> None:
    queries, heads, size = grad_query.shape
    per_program = block_heads(heads)
    _query_kernel[(triton.cdiv(heads, per_program), queries)](
        slopes,
        keys,
        where,
        grad_query,
        heads,
        where.shape[1],
        HALF=rank // 2,
        ROPE=size - rank,
        BLOCK_HEADS=per_program,
    )


def _shares(grad: torch.Tensor, query: torch.Tensor, weights: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """Return each query's contribution to each of its keys [blocks of heads, queries, selected, rank + rope]."""
    (queries, heads, size), rank, per_program = query.shape, grad.shape[-1], block_heads(query.shape[1])
    blocks = triton.cdiv(heads, per_program)
    shares = query.new_empty(blocks, queries, weights.shape[2], size)
    _share_kernel[(3, blocks, queries)](
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
    """Add each query's contributions to the gradients of its selected keys.

    `where` [queries, selected]: indices of the keys.
    """
    keys, size = grad_keys.shape
    owners, order = where.flatten().sort(stable=True)
    ends = torch.searchsorted(owners, torch.arange(keys + 1, dtype=owners.dtype, device=owners.device))
    _sum_kernel[(keys,)](
        shares,
        order,
        ends,
        grad_keys,
        shares.shape[0],
        where.numel(),
        RANK=rank,
        ROPE=size - rank,
        PAIRS=PAIRS,
        num_warps=PAIR_WARPS,
    )


@triton.jit
def _find(keys, where, slot, selected, size):
    """Return pointers to the keys in slots `slot` of a query's selection `where`, and which slots hold a key."""
    index = tl.load(where + slot, mask=slot < selected, other=-1)
    valid = index >= 0
    return keys + tl.where(valid, index, 0).to(tl.int64) * size, valid


@triton.jit
def _mean_kernel(grad, out, means, rows, RANK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    product = load(grad + row * RANK, 0, there, RANK).to(tl.float32) * load(out + row * RANK, 0, there, RANK)
    tl.store(means + row, tl.sum(product, 1), mask=there)


@triton.autotune(_WEIGHT_CONFIGS, key=["RANK", "ROPE", "BLOCK_HEADS", "selected"])
@triton.jit
def _weight_kernel(  # type: ignore[no-untyped-def]
    grad,
    query,
    keys,
    where,
    normaliser,
    mean,
    weights,
    slopes,
    scale,
    heads,
    selected,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = RANK + ROPE
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    there = head < heads
    place = token * heads + head
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, valid = _find(keys, where + token * selected, slot, selected, size)
    q_row, g_row = query + place * size, grad + place * RANK
    scores = tl.zeros([BLOCK_HEADS, BLOCK], tl.float32)
    share = tl.zeros([BLOCK_HEADS, BLOCK], tl.float32)
    for start in range(0, RANK, COLUMNS):
        part = tl.trans(load(key, start, valid, COLUMNS))
        scores = tl.dot(load(q_row, start, there, COLUMNS), part, scores)
        share = tl.dot(load(g_row, start, there, COLUMNS), part, share)
    part = tl.trans(load(key, RANK, valid, ROPE))
    scores = tl.dot(load(q_row, RANK, there, ROPE), part, scores)
    # weights of padding heads are exp2(0 - inf) = 0
    log_total = tl.load(normaliser + place, mask=there, other=float("inf"))
    delta = tl.load(mean + place, mask=there, other=0.0)
    weight = tl.exp2((scores * scale - log_total[:, None]) * 1.4426950408889634)
    weight = tl.where(valid[None, :], weight, 0.0)
    slope = weight * (share - delta[:, None]) * scale
    target = place[:, None] * selected + slot[None, :]
    present = there[:, None] & (slot < selected)[None, :]
    kind = weights.dtype.element_ty
    tl.store(weights + target, weight.to(kind), mask=present)
    tl.store(slopes + target, slope.to(kind), mask=present)


@triton.autotune(_QUERY_CONFIGS, key=["HALF", "ROPE", "BLOCK_HEADS", "selected"])
@triton.jit
def _query_kernel(  # type: ignore[no-untyped-def]
    slopes,
    keys,
    where,
    grad_query,
    heads,
    selected,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = 2 * HALF + ROPE
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    there = head < heads
    place = token * heads + head
    half, rope = tl.arange(0, HALF)[None, :], tl.arange(0, ROPE)[None, :]
    d_low = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    d_high = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    d_rope = tl.zeros([BLOCK_HEADS, ROPE], tl.float32)
    for start in range(0, selected, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        key, valid = _find(keys, where + token * selected, slot, selected, size)
        present = there[:, None] & (slot < selected)[None, :]
        slope = tl.load(slopes + place[:, None] * selected + slot[None, :], mask=present, other=0.0)
        d_low = tl.dot(slope, load(key, 0, valid, HALF), d_low)
        d_high = tl.dot(slope, load(key, HALF, valid, HALF), d_high)
        d_rope = tl.dot(slope, load(key, 2 * HALF, valid, ROPE), d_rope)
    column = grad_query + place[:, None] * size
    kind = grad_query.dtype.element_ty
    tl.store(column + half, d_low.to(kind), mask=there[:, None])
    tl.store(column + HALF + half, d_high.to(kind), mask=there[:, None])
    tl.store(column + 2 * HALF + rope, d_rope.to(kind), mask=there[:, None])


@triton.autotune(_SHARE_CONFIGS, key=["HALF", "ROPE", "BLOCK_HEADS", "selected"])
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
    part = tl.program_id(0)
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    there = head < heads
    place = token * heads + head
    first = (tl.program_id(1).to(tl.int64) * tl.num_programs(2) + token) * selected
    kind = shares.dtype.element_ty
    if part < 2:
        half = part * HALF + tl.arange(0, HALF)[None, :]
        mine = load(query + place * size, part * HALF, there, HALF)
        theirs = load(grad + place * (2 * HALF), part * HALF, there, HALF)
        for start in range(0, selected, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            inside = slot < selected
            source = place[:, None] * selected + slot[None, :]
            present = there[:, None] & inside[None, :]
            weight = tl.trans(tl.load(weights + source, mask=present, other=0.0))
            slope = tl.trans(tl.load(slopes + source, mask=present, other=0.0))
            made = tl.dot(weight, theirs, tl.dot(slope, mine))
            tl.store(shares + (first + slot)[:, None] * size + half, made.to(kind), mask=inside[:, None])
    else:
        rope = 2 * HALF + tl.arange(0, ROPE)[None, :]
        q_rope = load(query + place * size, 2 * HALF, there, ROPE)
        for start in range(0, selected, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            inside = slot < selected
            source = place[:, None] * selected + slot[None, :]
            present = there[:, None] & inside[None, :]
            d_rope = tl.dot(tl.trans(tl.load(slopes + source, mask=present, other=0.0)), q_rope)
            tl.store(shares + (first + slot)[:, None] * size + rope, d_rope.to(kind), mask=inside[:, None])


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    shares, order, ends, grad_keys, blocks, pairs, RANK: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr
):
    key = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(ends + key), tl.load(ends + key + 1)
    if begin < end:
        rank, rope = tl.arange(0, RANK), tl.arange(0, ROPE)
        target = grad_keys + key * (RANK + ROPE)
        low, high = tl.load(target + rank), tl.load(target + RANK + rope)
        for block in range(blocks):
            for start in range(begin, end, PAIRS):
                slot = start + tl.arange(0, PAIRS)
                there = slot < end
                pair = tl.load(order + slot, mask=there, other=0) + tl.cast(block, tl.int64) * pairs
                row = shares + pair * (RANK + ROPE)
                low += tl.sum(load(row, 0, there, RANK).to(tl.float32), 0)
                high += tl.sum(load(row, RANK, there, ROPE).to(tl.float32), 0)
        tl.store(target + rank, low)
        tl.store(target + RANK + rope, high)

"""Attention over selected keys on NVIDIA GPUs, as Triton kernels: nothing that is gathered is ever stored.

One program handles one query with all its heads (up to 64 at a time): it walks over the selected keys in blocks, loads
each from where it is, and keeps a running softmax (https://arxiv.org/abs/2307.08691, algorithm 1). The backward pass
computes the weights anew and adds every key's gradient to one float32 buffer with atomic additions, so the last bits of
gradients differ from run to run.

Shapes are those of `sparse_mla._forward`: query [queries, heads, rank + rope], keys [keys, rank + rope], where
[queries, selected] int32 with -1 for none. `rank` and `rope` are powers of two, 32 and 16 at least.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MAX_HEADS = 64
"""Heads of one program: more would not fit into its registers."""
CHUNK = 4096
_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((64, 8, 1), (32, 8, 2), (32, 8, 1), (64, 8, 2), (32, 4, 1), (16, 8, 2))
]


def forward(
    query: torch.Tensor, keys: torch.Tensor, where: torch.Tensor, rank: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [queries, heads, rank] and the log of the softmax's denominators [queries, heads, 1] in float32."""
    queries, heads, size = query.shape
    out = query.new_empty(queries, heads, rank)
    normaliser = query.new_empty(queries, heads, 1, dtype=torch.float32)
    block_heads = _block_heads(heads)
    _forward_kernel[(queries, triton.cdiv(heads, block_heads))](
        query.contiguous(),
        keys.contiguous(),
        where.contiguous(),
        out,
        normaliser,
        scale * LOG2_E,
        heads,
        where.shape[1],
        HALF=rank // 2,
        ROPE=size - rank,
        BLOCK_HEADS=block_heads,
    )
    return out, normaliser


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
    queries, heads, size = query.shape
    rank = grad.shape[-1]
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_keys = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
    # some queries at a time: all products in float32 would be 50 GB with 131,072 queries of 64 heads
    parts = zip(grad.split(CHUNK), out.split(CHUNK), strict=True)
    mean = torch.cat([(mine.float() * other.float()).sum(-1) for mine, other in parts])
    block_heads = _block_heads(heads)
    _backward_kernel[(queries, triton.cdiv(heads, block_heads))](
        grad.contiguous(),
        query.contiguous(),
        keys.contiguous(),
        where.contiguous(),
        normaliser,
        mean,
        grad_query,
        grad_keys,
        scale,
        heads,
        where.shape[1],
        HALF=rank // 2,
        ROPE=size - rank,
        BLOCK_HEADS=block_heads,
    )
    return grad_query, grad_keys.to(keys.dtype)


def _block_heads(heads: int) -> int:
    return min(MAX_HEADS, max(16, triton.next_power_of_2(heads)))


@triton.jit
def _load(rows, first, mask, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns first .. first + WIDTH of rows [n] (pointers to their first element); zeros where masked."""
    return tl.load(rows[:, None] + first + tl.arange(0, WIDTH)[None, :], mask=mask[:, None], other=0.0)


@triton.autotune(_CONFIGS, key=["HALF", "ROPE", "BLOCK_HEADS", "selected"])
@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    where,
    out,
    normaliser,
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
    row = query + (token * heads + head) * size
    q_low = _load(row, 0, there, HALF)
    q_high = _load(row, HALF, there, HALF)
    q_rope = _load(row, 2 * HALF, there, ROPE)
    largest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    low = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    high = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    for start in range(0, selected, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        index = tl.load(where + token * selected + slot, mask=slot < selected, other=-1)
        valid = index >= 0
        key = keys + tl.where(valid, index, 0).to(tl.int64) * size
        k_low = _load(key, 0, valid, HALF)
        k_high = _load(key, HALF, valid, HALF)
        k_rope = _load(key, 2 * HALF, valid, ROPE)
        scores = tl.dot(q_low, tl.trans(k_low))
        scores = tl.dot(q_high, tl.trans(k_high), scores)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores)
        scores = tl.where(valid[None, :], scores * scale, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        # no key yet: any finite number will do
        base = tl.where(top == float("-inf"), 0.0, top)
        decay = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(k_low.dtype)
        low = tl.dot(weights, k_low, low * decay[:, None])
        high = tl.dot(weights, k_high, high * decay[:, None])
        largest = top
    # padding heads have no keys to divide by
    total = tl.where(total == 0.0, 1.0, total)
    place = (token * heads + head)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    tl.store(out + place, (low / total[:, None]).to(out.dtype.element_ty), mask=there[:, None])
    tl.store(out + place + HALF, (high / total[:, None]).to(out.dtype.element_ty), mask=there[:, None])
    tl.store(normaliser + token * heads + head, (largest + tl.log2(total)) * 0.6931471805599453, mask=there)


@triton.autotune(_CONFIGS, key=["HALF", "ROPE", "BLOCK_HEADS", "selected"], reset_to_zero=["grad_keys"])
@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    query,
    keys,
    where,
    normaliser,
    mean,
    grad_query,
    grad_keys,
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
    q_low = _load(row, 0, there, HALF)
    q_high = _load(row, HALF, there, HALF)
    q_rope = _load(row, 2 * HALF, there, ROPE)
    row = grad + place * (2 * HALF)
    g_low = _load(row, 0, there, HALF)
    g_high = _load(row, HALF, there, HALF)
    # weights of padding heads are exp2(0 - inf) = 0
    log_total = tl.load(normaliser + place, mask=there, other=float("inf"))
    delta = tl.load(mean + place, mask=there, other=0.0)
    d_low = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    d_high = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    d_rope = tl.zeros([BLOCK_HEADS, ROPE], tl.float32)
    for start in range(0, selected, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        index = tl.load(where + token * selected + slot, mask=slot < selected, other=-1)
        valid = index >= 0
        at = tl.where(valid, index, 0).to(tl.int64) * size
        k_low = _load(keys + at, 0, valid, HALF)
        k_high = _load(keys + at, HALF, valid, HALF)
        k_rope = _load(keys + at, 2 * HALF, valid, ROPE)
        scores = tl.dot(q_low, tl.trans(k_low))
        scores = tl.dot(q_high, tl.trans(k_high), scores)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores)
        share = tl.dot(g_low, tl.trans(k_low))
        share = tl.dot(g_high, tl.trans(k_high), share)
        weights = tl.exp2((scores * scale - log_total[:, None]) * 1.4426950408889634)
        weights = tl.where(valid[None, :], weights, 0.0)
        d_scores = (weights * (share - delta[:, None]) * scale).to(k_low.dtype)
        weights = weights.to(k_low.dtype)
        d_low = tl.dot(d_scores, k_low, d_low)
        d_high = tl.dot(d_scores, k_high, d_high)
        d_rope = tl.dot(d_scores, k_rope, d_rope)
        target = (grad_keys + at)[:, None]
        half = tl.arange(0, HALF)[None, :]
        part = tl.dot(tl.trans(d_scores), q_low)
        part = tl.dot(tl.trans(weights), g_low, part)
        tl.atomic_add(target + half, part, mask=valid[:, None], sem="relaxed")
        part = tl.dot(tl.trans(d_scores), q_high)
        part = tl.dot(tl.trans(weights), g_high, part)
        tl.atomic_add(target + HALF + half, part, mask=valid[:, None], sem="relaxed")
        part = tl.dot(tl.trans(d_scores), q_rope)
        tl.atomic_add(target + 2 * HALF + tl.arange(0, ROPE)[None, :], part, mask=valid[:, None], sem="relaxed")
    column = place[:, None] * size
    half = tl.arange(0, HALF)[None, :]
    kind = grad_query.dtype.element_ty
    tl.store(grad_query + column + half, d_low.to(kind), mask=there[:, None])
    tl.store(grad_query + column + HALF + half, d_high.to(kind), mask=there[:, None])
    tl.store(grad_query + column + 2 * HALF + tl.arange(0, ROPE)[None, :], d_rope.to(kind), mask=there[:, None])

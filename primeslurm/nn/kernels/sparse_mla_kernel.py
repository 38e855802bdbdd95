"""Triton kernels for attention over selected keys on NVIDIA GPUs, without storing gathered keys.

A program computes one query with up to 64 heads, with a running softmax (FlashAttention-2, arXiv 2307.08691, algorithm
1). Shapes are those of `sparse_mla._forward`: query [queries, heads, rank + rope], keys [keys, rank + rope], where
[queries, selected] int32 with -1 for none. `rank` and `rope` are powers of two, at least 32 and 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
# Maximum number of heads per program. More would not fit into its registers.
MAX_HEADS = 64
_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((64, 8, 1), (32, 8, 2), (32, 8, 1), (64, 8, 2), (32, 4, 1), (16, 8, 2))
]


def forward(
    query: torch.Tensor, keys: torch.Tensor, where: torch.Tensor, rank: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [queries, heads, rank] and the log-sum-exp of the scores [queries, heads, 1] float32."""
    queries, heads, size = query.shape
    out = query.new_empty(queries, heads, rank)
    normaliser = query.new_empty(queries, heads, 1, dtype=torch.float32)
    per_program = block_heads(heads)
    _forward_kernel[(queries, triton.cdiv(heads, per_program))](
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
        BLOCK_HEADS=per_program,
    )
    return out, normaliser


def block_heads(heads: int) -> int:
    return min(MAX_HEADS, max(16, triton.next_power_of_2(heads)))


@triton.jit
def load(rows, first, mask, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load columns first..first + WIDTH of rows [n], given by pointers to their first element; 0 where masked."""
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
    q_low = load(row, 0, there, HALF)
    q_high = load(row, HALF, there, HALF)
    q_rope = load(row, 2 * HALF, there, ROPE)
    largest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    low = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    high = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    for start in range(0, selected, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        index = tl.load(where + token * selected + slot, mask=slot < selected, other=-1)
        valid = index >= 0
        key = keys + tl.where(valid, index, 0).to(tl.int64) * size
        k_low = load(key, 0, valid, HALF)
        k_high = load(key, HALF, valid, HALF)
        k_rope = load(key, 2 * HALF, valid, ROPE)
        scores = tl.dot(q_low, tl.trans(k_low))
        scores = tl.dot(q_high, tl.trans(k_high), scores)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores)
        scores = tl.where(valid[None, :], scores * scale, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        # Before the first key, any finite base avoids NaN.
        base = tl.where(top == float("-inf"), 0.0, top)
        decay = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(k_low.dtype)
        low = tl.dot(weights, k_low, low * decay[:, None])
        high = tl.dot(weights, k_high, high * decay[:, None])
        largest = top
    # Padding heads have no keys, so their sum is 0.
    total = tl.where(total == 0.0, 1.0, total)
    place = (token * heads + head)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    tl.store(out + place, (low / total[:, None]).to(out.dtype.element_ty), mask=there[:, None])
    tl.store(out + place + HALF, (high / total[:, None]).to(out.dtype.element_ty), mask=there[:, None])
    tl.store(normaliser + token * heads + head, (largest + tl.log2(total)) * 0.6931471805599453, mask=there)

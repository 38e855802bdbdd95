"""Scores of DSA's indexer on NVIDIA GPUs, summed over heads before they are stored.

A score is the sum over heads of weight * relu(query . key) (DeepSeek-V3.2-Exp report, equation 1), of queries and keys
as `index_rounding` rounds them. Hopper GPUs use DeepGEMM's kernel, as vLLM's engines do. Others use a Triton kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from primeslurm.nn.kernels.fp8.deep_gemm import index_library
from primeslurm.nn.kernels.index_rounding import quantize, rounded

# Tile size
QUERIES, KEYS = 64, 128
# Head size and numbers of heads that DeepGEMM's kernel supports
SIZE, HEADS = 128, (32, 64)


def index_scores(
    query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Return float32 scores [queries, keys + padding], with -inf for keys outside of first..last and for padding.

    Queries [queries, heads, head_dim] and keys [keys, head_dim] are bfloat16, and head_dim is a power of two. Weights
    are [queries, heads] float32; `first` and `last` are the visible keys of each query [queries].
    """
    library = index_library()
    if library is None or query.shape[2] != SIZE or query.shape[1] not in HEADS:
        return triton_scores(rounded(query), rounded(keys), weight, first, last)
    data, scales = quantize(query)
    seen = first.int(), last.int() + 1
    scores: torch.Tensor = library.fp8_fp4_mqa_logits(
        (data, None), quantize(keys), weight.float() * scales, *seen, clean_logits=True
    )
    return _whole(scores)


def _whole(scores: torch.Tensor) -> torch.Tensor:
    """Return scores with the padding columns that DeepGEMM has cut off, filled with -inf."""
    # torch's top-k would copy a tensor that is not contiguous.
    queries, keys = scores.shape
    whole = scores.as_strided((queries, scores.stride(0)), (scores.stride(0), 1))
    whole[:, keys:] = float("-inf")
    return whole


def triton_scores(
    query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Return `index_scores` by the Triton kernel, from queries and keys that are already rounded."""
    queries, heads, size = query.shape
    scores = torch.empty(queries, len(keys), dtype=torch.float32, device=keys.device)
    _scores_kernel[(triton.cdiv(queries, QUERIES), triton.cdiv(len(keys), KEYS))](
        query.contiguous(),
        keys.contiguous(),
        weight.contiguous(),
        first.contiguous(),
        last.contiguous(),
        scores,
        queries,
        len(keys),
        heads,
        SIZE=size,
        QUERIES=QUERIES,
        KEYS=KEYS,
        num_warps=4,
        num_stages=3,
    )
    return scores


@triton.jit
def _scores_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    weight,
    first,
    last,
    scores,
    queries,
    length,
    heads,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    index = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    there, inside = token < queries, index < length
    begin = tl.load(first + token, mask=there, other=1)
    end = tl.load(last + token, mask=there, other=0)
    visible = (index[None, :] >= begin[:, None]) & (index[None, :] <= end[:, None])
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    if tl.max(visible.to(tl.int32)) > 0:
        column = tl.arange(0, SIZE)
        key = tl.load(keys + index[:, None].to(tl.int64) * SIZE + column[None, :], mask=inside[:, None], other=0.0)
        for head in range(heads):
            place = token * heads + head
            mine = tl.load(query + place[:, None] * SIZE + column[None, :], mask=there[:, None], other=0.0)
            share = tl.load(weight + place, mask=there, other=0.0)
            total += tl.maximum(tl.dot(mine, tl.trans(key)), 0.0) * share[:, None]
    total = tl.where(visible, total, float("-inf"))
    target = scores + token[:, None] * length + index[None, :]
    tl.store(target, total, mask=there[:, None] & inside[None, :])

"""Attention over selected keys: gathered and dense variants match a plain loop, forward and backward."""

from __future__ import annotations

import pytest
import torch

from primeslurm.nn.kernels import index_rounding, sparse_mla
from primeslurm.nn.kernels.sparse_mla import dense_mla
from primeslurm.nn.layers import sparse_attention

ROWS, QUERIES, KEYS, HEADS, RANK, ROPE, TOP_K, SCALE = 2, 12, 20, 3, 8, 4, 5, 0.3


def make_inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return float64 inputs with gradients, and selections with as few as one key."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, QUERIES, HEADS, RANK + ROPE), (ROWS, KEYS, RANK + ROPE))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    indices = torch.rand(ROWS, QUERIES, KEYS, generator=generator).topk(TOP_K).indices.int()
    absent = torch.rand(ROWS, QUERIES, TOP_K, generator=generator) < 0.4
    absent[..., 0] = False
    return tensors, indices.masked_fill(absent, -1)


def plain(tensors: list[torch.Tensor], indices: torch.Tensor) -> torch.Tensor:
    queries, keys = tensors
    rows = []
    for row in range(ROWS):
        for query in range(QUERIES):
            own = keys[row, indices[row, query][indices[row, query] >= 0].long()]
            scores = queries[row, query] @ own.T
            rows.append((scores * SCALE).softmax(-1) @ own[:, :RANK])
    return torch.stack(rows).view(ROWS, QUERIES, HEADS, RANK)


@pytest.mark.parametrize("attend", [dense_mla, sparse_mla.sparse_mla])
def test_outputs_and_gradients_match_a_plain_loop(attend: sparse_mla.Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_mla, "CHUNK", 7)  # not a divisor of the number of queries
    tensors, indices = make_inputs()
    expected, out = plain(tensors, indices), attend(*tensors, indices, RANK, SCALE)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weight).sum(), tensors)
    gradients = torch.autograd.grad((out * weight).sum(), tensors)
    # the softmax itself is computed in float32
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    for mine, reference in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, reference, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("at_once", [100, 7])
def test_best_visible_keys_are_selected(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "QUERIES", at_once)
    generator = torch.Generator().manual_seed(0)
    heads, length, top_k = 6, 24, 4
    query = torch.randn(1, length, heads, 8, generator=generator)
    keys = torch.randn(1, length, 8, generator=generator)
    weight = torch.randn(1, length, heads, generator=generator)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    context = sparse_attention.Context.of(positions)
    selected = sparse_attention.select(query, keys, weight, context, top_k)
    # the second of two context-parallel ranks has half of the queries
    context = sparse_attention.Context(context.first[:, 12:], context.last[:, 12:], 12)
    later = sparse_attention.select(query[:, 12:], keys, weight[:, 12:], context, top_k)
    for token in range(length):
        start = 0 if token < 10 else 10
        seen = range(start, token + 1)
        score = {key: float(weight[0, token] @ (query[0, token] @ keys[0, key]).relu()) for key in seen}
        best = sorted(score, key=lambda key: -score[key])[:top_k]
        for actual in (selected[0, token], *([later[0, token - 12]] if token >= 12 else [])):
            chosen = [key for key in actual.tolist() if key >= 0]
            assert sorted(score[key] for key in chosen) == pytest.approx(sorted(score[key] for key in best))
            assert set(chosen) <= set(seen) and len(set(chosen)) == len(best)


def test_indexer_rounding_uses_power_of_two_scales() -> None:
    rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[3] = 0
    rows[4] *= 1e-3
    data, scales = index_rounding.quantize(rows)
    assert torch.equal(scales, scales.log2().round().exp2())
    assert data.float().abs().amax(-1)[5:].ge(224).all(), "no scale is larger than it must be"
    actual = index_rounding.rounded(rows)
    assert torch.equal(actual.float(), data.float() * scales[:, None])
    # e4m3 has three bits after the point, and numbers below 2^-6 are 2^-9 apart
    assert ((actual.float() - rows.float()).abs() <= rows.float().abs() / 16 + scales[:, None] * 2.0**-10).all()
    assert torch.equal(index_rounding.rounded(actual), actual)

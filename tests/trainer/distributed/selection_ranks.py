"""A rank that selects keys for its shard of rows, and counts the scored keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from primeslurm.nn.layers import sparse_attention
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import join

ROWS, HEADS, WIDTH, TOP_K = 2, 8, 16, 6
PIECES = (32, 7)
"""Tokens per rank and row, including odd numbers."""


def main() -> None:
    """Print the number of scored keys for each shard length."""
    join(Interrupt(), timeout_s=600)
    scores, scored = sparse_attention._scores, [0]

    def count(query: torch.Tensor, keys: torch.Tensor, *visible: Any) -> torch.Tensor:
        scored[0] += len(query) * len(keys)
        return scores(query, keys, *visible)

    sparse_attention._scores = count
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None
    for piece in PIECES:
        whole = piece * dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        shapes = ((ROWS, whole, HEADS, WIDTH), (ROWS, whole, WIDTH), (ROWS, whole, HEADS))
        query, keys, weight = (torch.randn(shape, generator=generator) for shape in shapes)
        positions = torch.stack([torch.cat([torch.arange(n), torch.arange(whole - n)]) for n in (5, whole // 2 + 3)])
        context = sparse_attention.Context.of(positions)
        expected = sparse_attention.select(query, keys, weight, context, TOP_K)
        scored[0] = 0
        own = slice(rank * piece, (rank + 1) * piece)
        actual = sparse_attention.select(query[:, own], keys, weight[:, own], context.shard(world), TOP_K)
        assert actual.shape == expected[:, own].shape and actual.dtype == expected.dtype
        assert torch.equal(actual.sort().values, expected[:, own].sort().values)
        print(f"SCORED {scored[0]}", flush=True)


if __name__ == "__main__":
    main()

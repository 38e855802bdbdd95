"""With context parallelism, queries see the same keys as in whole rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from primeslurm.models.qwen3_5.delta_net import DeltaScan
from primeslurm.trainer.components.varlen_attention import VarlenAttention, visible
from primeslurm.trainer.distributed import context_parallel
from primeslurm.trainer.distributed.world import World
from tests.trainer.conftest import finish, start_ranks
from tests.trainer.distributed.selection_ranks import PIECES, ROWS

SEQ_LEN = 24
LENGTHS = ((5, 1, 12, 6), (24,), (8, 8, 8))
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])


@pytest.mark.parametrize("window", [(-1, 0), (3, 0)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_document_boundaries_of_a_shard_match_whole_rows(ranks: int, window: tuple[int, int]) -> None:
    documents = create_varlen_metadata_for_document(POSITIONS)
    whole = visible(documents, window)
    piece = SEQ_LEN // ranks
    for rank in range(ranks):
        local = context_parallel.local_documents(documents, SEQ_LEN, rank, ranks)
        mine = visible(local.metadata, window)
        starts = range(0, len(LENGTHS) * SEQ_LEN, SEQ_LEN)
        queries = torch.cat([torch.arange(piece) + start + rank * piece for start in starts])
        keys = torch.cat([torch.arange(*span) + start for start, span in zip(starts, local.keys, strict=True)])
        assert torch.equal(mine, whole[queries][:, keys])
        assert mine.sum() == whole[queries].sum(), "no key is left out"
        assert local.metadata.max_q <= piece and local.metadata.max_k <= max(map(max, LENGTHS))


@pytest.mark.parametrize("ranks", [2, 3])
def test_block_mask_of_a_shard_matches_whole_rows(ranks: int) -> None:
    document = (POSITIONS == 0).cumsum(1)

    def seen(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (document[row, query] == document[row, key])

    rows, piece = len(LENGTHS), SEQ_LEN // ranks
    whole = create_mask(seen, rows, 1, SEQ_LEN, SEQ_LEN, "cpu")
    mask = create_block_mask(seen, rows, None, SEQ_LEN, SEQ_LEN, "cpu", BLOCK_SIZE=16)
    for rank in range(ranks):
        local = context_parallel.local_block_mask(mask, rank, ranks)
        assert local.shape == (rows, 1, piece, SEQ_LEN) and local.BLOCK_SIZE == mask.BLOCK_SIZE
        mine = create_mask(local.mask_mod, rows, 1, piece, SEQ_LEN, "cpu")
        assert torch.equal(mine, whole[:, :, rank * piece : (rank + 1) * piece])


@pytest.mark.parametrize("style", ["ulysses", "allgather"])
def test_out_transform_matches_one_rank(style: context_parallel.Style, world: World) -> None:
    documents = create_varlen_metadata_for_document(POSITIONS)
    alone, shared = (torch.nn.Sequential(VarlenAttention.Config().build()) for _ in range(2))
    group = context_parallel.ContextParallel(style, dist.group.WORLD)
    group.attach(shared)
    q, k, v = (torch.randn(len(LENGTHS), SEQ_LEN, heads, 8) for heads in (4, 2, 2))
    sinks = torch.randn(4)

    def weigh(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        assert out.shape == q.shape and lse.shape == q.shape[:-1]
        return out * (lse - sinks).sigmoid().unsqueeze(-1)

    expected = alone[0](q, k, v, attention_masks=documents, out_transform=weigh)
    masks = group.masks({"full": documents}, SEQ_LEN)["full"]
    actual = shared[0](q, k, v, attention_masks=masks, out_transform=weigh)
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(expected, alone[0](q, k, v, attention_masks=documents))


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_select_the_same_keys_with_balanced_scores(ranks: int) -> None:
    outputs = finish(start_ranks(ranks, "tests.trainer.distributed.selection_ranks"))
    counts = [[int(line.split()[1]) for line in output.splitlines() if line.startswith("SCORED")] for output in outputs]
    for piece, scored in zip(PIECES, zip(*counts, strict=True), strict=True):
        if piece % 2 == 0:  # a half is scored with all keys up to its last
            assert scored == (ROWS * piece // 2 * (ranks * piece + piece // 2),) * ranks
        assert max(scored) < 1.25 * sum(scored) / ranks, "the last rank would have up to twice the mean"


@pytest.mark.parametrize(
    ("style", "ranks", "problem"),
    [
        ("allgather", 2, "cp_style: allgather has nothing to gather for recurrent layers"),
        ("ulysses", 3, "cp: 3 does not divide the 4 heads of recurrent layers"),
    ],
)
def test_recurrent_layers_that_cannot_be_split_are_rejected(
    style: context_parallel.Style, ranks: int, problem: str
) -> None:
    group: Any = SimpleNamespace(size=lambda: ranks)  # torch's own needs as many processes
    with pytest.raises(ValueError, match=problem):
        context_parallel.ContextParallel(style, group).attach(torch.nn.Sequential(DeltaScan(4, 16)))


@pytest.mark.parametrize(("heads", "ranks", "copies"), [(8, 4, 1), (2, 4, 2), (1, 8, 8), (6, 4, 2), (4, 1, 1)])
def test_every_rank_gets_the_same_number_of_heads(heads: int, ranks: int, copies: int) -> None:
    keys = torch.arange(heads).reshape(1, 1, heads, 1)
    spread = context_parallel.replicated(keys, ranks)
    assert spread.shape[2] % ranks == 0
    assert spread.flatten().tolist() == [head for head in range(heads) for _ in range(copies)]

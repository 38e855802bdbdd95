"""Weights gathered in FP8 train bit for bit like weights quantized after the gather."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from primeslurm.nn.expert_splits import whole_blocks
from primeslurm.nn.kernels.fp8 import placeholder_tensor
from primeslurm.nn.kernels.fp8.blocks import BLOCKS, Quantized, amax_of_blocks, encode_blocks, quantize, scales_of
from tests.support.block_fp8 import matrix
from tests.trainer.conftest import finish, start_ranks
from tests.trainer.distributed.fp8_gather_ranks import SHAPES


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.campaign), 3])
def test_fp8_gather_trains_the_same(ranks: int) -> None:
    outputs = finish(start_ranks(ranks, "tests.trainer.distributed.fp8_gather_ranks"))
    stacks = {"experts": 6, "matrices": 6, "parts of blocks": 0}
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("STACKS")]
        assert lines == [f"STACKS {name}: {stacks[name]}" for name in SHAPES for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_quantized_with_common_scales_match_the_whole(dtype: torch.dtype) -> None:
    values = matrix(2, 256, 384).float()
    values[0, :128, :128] = 0
    whole = quantize(values.to(dtype), BLOCKS)
    for dimension in (0, 1, 2):
        parts = values.chunk(2 if dimension < 2 else 3, dimension)
        scales = torch.cat([scales_of(amax_of_blocks(part.contiguous(), dtype)) for part in parts], dimension)
        assert torch.equal(scales, whole.scales)
        pairs = zip(parts, scales.chunk(len(parts), dimension), strict=True)
        data = [encode_blocks(part.contiguous(), part_scales, dtype).view(torch.uint8) for part, part_scales in pairs]
        assert torch.equal(torch.cat(data, dimension), whole.data.view(torch.uint8))


def test_transposed_weight_matches_its_quantization() -> None:
    values = matrix(2, 256, 384)
    actual, expected = quantize(values, BLOCKS).transposed(), quantize(values.mT, BLOCKS)
    assert torch.equal(actual.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(actual.scales, expected.scales)


@pytest.mark.parametrize(
    ("size", "dimension", "ranks", "whole"),
    [
        ((6, 128, 256), 0, 3, True),
        ((6, 128, 200), 0, 3, False),
        ((4, 128, 256), 0, 3, False),
        ((4, 384, 768), 1, 3, True),
        ((4, 384, 768), 1, 6, False),
        ((4, 200, 384), 2, 3, False),
    ],
)
def test_whole_blocks(size: tuple[int, ...], dimension: int, ranks: int, whole: bool) -> None:
    assert whole_blocks(size, dimension, ranks, 128) == whole


def stood_in(values: torch.Tensor) -> tuple[torch.Tensor, Quantized]:
    numbers = quantize(values, BLOCKS)
    return placeholder_tensor.create(numbers, values.shape, values.dtype, values.device), numbers


@pytest.mark.parametrize("view", [torch.detach, lambda t: t.view(2, 256, 128), lambda t: t.mT.mT])
def test_views_of_a_placeholder_have_its_contents(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor, numbers = stood_in(matrix(2, 256, 128))
    assert quantize(view(tensor), BLOCKS) is numbers
    assert tensor.data_ptr() == 0 and tensor.shape == (2, 256, 128) and tensor.dtype == torch.bfloat16
    assert quantize(view(tensor).mT, BLOCKS).data.shape == (2, 128, 256)


def test_slice_of_a_placeholder_is_rejected() -> None:
    tensor, _ = stood_in(matrix(2, 256, 128))
    with pytest.raises(AssertionError, match="a slice of a placeholder"):
        quantize(tensor[0], BLOCKS)


def test_other_tensors_have_no_contents() -> None:
    tensor, _ = stood_in(matrix(2, 256, 128))
    assert placeholder_tensor.lookup(torch.empty(3)) is None
    address = tensor.untyped_storage()._cdata
    del tensor
    kept = [torch.empty(2, 256, 128, dtype=torch.bfloat16) for _ in range(100)]
    assert all(other.untyped_storage()._cdata != address and placeholder_tensor.lookup(other) is None for other in kept)
    another, _ = stood_in(matrix(2, 256, 128))
    assert placeholder_tensor.lookup(another) is not None and not any(
        known.expired() for known, _ in placeholder_tensor._contents.values()
    )

"""DeepGEMM's products compared with float64 products of the same quantised operands, and a layer's gradients on a GPU.

Accumulation is in float32, so results differ from float64 by the rounding of bfloat16 results (2^-9) or, for weight
gradients, of float32 sums whose tensor-core part has fewer bits. Each may differ by 1e-3 of the whole.
"""

from __future__ import annotations

import pytest
import torch

from primeslurm.nn.kernels.fp8.backend import backend
from primeslurm.nn.kernels.fp8.blocks import (
    BLOCKS,
    ROWS,
    Quantized,
    amax_of_blocks,
    encode_blocks,
    quantize,
    quantize_both_ways,
    quantize_groups,
    quantize_groups_both_ways,
    quantize_groups_transposed,
    quantize_transposed,
    scales_of,
)
from primeslurm.nn.layers import fp8
from tests.support import block_fp8 as exact
from tests.support.block_fp8 import OFFSETS, matrix, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(memory_gb=8),
    pytest.mark.timeout(600),  # kernels are compiled when they are first used
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs an SM90 GPU"
    ),
]
TOLERANCE = {"bfloat16": 4e-3, "float32": 1e-3}


def assert_alike(there: Quantized, here: Quantized) -> None:
    """The last bit of a scale may move a value to its neighbour."""
    torch.testing.assert_close(there.scales.cpu(), here.scales, rtol=1e-6, atol=0)
    actual, expected = there.data.cpu().float(), here.data.float()
    torch.testing.assert_close(actual, expected, rtol=2.0**-3, atol=2.0**-9)
    assert (actual != expected).float().mean() < 1e-3
    assert there.data.is_contiguous()


def assert_equal(actual: tuple[Quantized, Quantized], expected: tuple[Quantized, Quantized]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8)) and one.data.is_contiguous()
        assert torch.equal(one.scales, other.scales) and one.scales.stride() == other.scales.stride()


@pytest.mark.parametrize("block", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("shape", [(256, 384), (130, 256), (256, 130), (3, 200, 130), (3, 256, 128)])
def test_gpu_quantiser_equals_the_cpus(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    values = matrix(*shape)
    values[..., :128, :128] = 0
    assert_alike(quantize(values.cuda(), block), quantize(values, block))
    assert_alike(quantize(values.cuda().mT, block), quantize(values.mT, block))


@pytest.mark.parametrize("width", [256, 200])
def test_groups_are_quantised_as_on_the_cpu(width: int) -> None:
    here, rows = exact.groups_and_rows(width, "cpu")
    there = exact.groups_and_rows(width, "cuda")[0]
    for source in (rows, rows.T.contiguous().T):
        on_gpu = source.cuda()
        assert_alike(quantize_groups(on_gpu, there), quantize_groups(source, here))
        assert_alike(quantize_groups_transposed(on_gpu, there), quantize_groups_transposed(source, here))
        apart = quantize_groups(on_gpu, there), quantize_groups_transposed(on_gpu, there)
        assert_equal(quantize_groups_both_ways(on_gpu, there), apart)


@pytest.mark.parametrize("shape", [(256, 384), (130, 256), (3, 128)])
def test_quantising_both_ways_equals_quantising_each_way(shape: tuple[int, int]) -> None:
    for values in (matrix(*shape, device="cuda"), matrix(*shape[::-1], device="cuda").mT):
        assert_equal(quantize_both_ways(values), (quantize(values, ROWS), quantize_transposed(values)))


def test_product_and_gradients_of_a_linear_layer() -> None:
    gemm = backend("cuda")
    rows, weight, left, right = exact.operands("cuda")
    forward = gemm.product(rows, weight)
    assert relative_error(forward, rows.values(torch.float64) @ weight.values(torch.float64).T) < TOLERANCE["bfloat16"]
    gradient = quantize(matrix(384, 128, device="cuda", seed=2), ROWS)
    backward = gemm.product(gradient, quantize(matrix(128, 256, device="cuda", seed=1).mT, BLOCKS))
    expected = gradient.values(torch.float64) @ weight.values(torch.float64)
    assert relative_error(backward, expected) < TOLERANCE["bfloat16"]
    outer = gemm.outer(left, right)
    assert relative_error(outer, left.values(torch.float64) @ right.values(torch.float64).T) < TOLERANCE["float32"]


def test_grouped_product_and_gradients_with_uneven_and_empty_groups() -> None:
    gemm = backend("cuda")
    groups, rows = exact.groups_and_rows(256, "cuda")
    upstream = matrix(OFFSETS[-1], 128, device="cuda", seed=2)
    weight = matrix(5, 128, 256, device="cuda", seed=1)
    for source, b in ((rows, quantize(weight, BLOCKS)), (upstream, quantize(weight.mT, BLOCKS))):
        a = quantize_groups(source, groups)
        product = gemm.grouped_product(a, b, groups)[groups.places]
        assert relative_error(product, exact.exact_grouped_product(a, b, groups)) < TOLERANCE["bfloat16"]
    left, right = (quantize_groups_transposed(t, groups) for t in (upstream, rows))
    outer = gemm.grouped_outer(left, right, groups)
    assert relative_error(outer, exact.exact_grouped_outer(upstream, rows, groups)) < TOLERANCE["float32"]
    assert not outer[1].any() and not outer[3].any()


@pytest.mark.parametrize(("n", "k"), [(128, 256), (160, 200)], ids=["whole blocks", "cut off"])
def test_layers_on_the_gpu_equal_their_emulation(n: int, k: int) -> None:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    results = []
    for device in ("cuda", "cpu"):
        x = matrix(OFFSETS[-1], k, device=device).requires_grad_()
        w = matrix(n, k, device=device, seed=1).requires_grad_()
        e = matrix(5, n, k, device=device, seed=3).requires_grad_()
        out = fp8.linear_product(x, w) + fp8.grouped_product(x, e, offsets.to(device))
        out.backward(matrix(OFFSETS[-1], n, device=device, seed=2))
        results.append([t.detach().cpu() for t in (out, x.grad, w.grad, e.grad)])
    for gpu, cpu in zip(*results, strict=True):
        assert relative_error(gpu, cpu.double()) < 2 * TOLERANCE["bfloat16"]


def test_products_share_a_quantised_input() -> None:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    results = []
    for device in ("cuda", "cpu"):
        x = matrix(OFFSETS[-1], 256, device=device).requires_grad_()
        dense = [matrix(128, 256, device=device, seed=i).requires_grad_() for i in (1, 2)]
        experts = [matrix(5, 128, 256, device=device, seed=i).requires_grad_() for i in (3, 4)]
        ends = offsets.to(device)
        for factor in (2, 1):  # the last round must not reuse the first one's quantised tensors
            rows = x * factor
            parts = [fp8.linear_product(rows, w) for w in dense] + [fp8.grouped_product(rows, e, ends) for e in experts]
            gradient = matrix(4, OFFSETS[-1], 128, device=device, seed=5)
            actual = torch.autograd.grad(parts, [x, *dense, *experts], list(gradient))
        results.append([t.detach().cpu() for t in (*parts, *actual)])
    for gpu, cpu in zip(*results, strict=True):
        assert relative_error(gpu, cpu.double()) < 2 * TOLERANCE["bfloat16"]


@pytest.mark.parametrize("shape", [(256, 384), (3, 256, 128)])
def test_shards_quantised_with_known_scales_equal_the_whole(shape: tuple[int, ...]) -> None:
    """As ranks do that have a shard each; also in float32, like master weights."""
    values = matrix(*shape).float()
    values[..., :128, :128] = 0
    there, whole = values.cuda(), quantize(values.cuda().bfloat16(), BLOCKS)
    assert torch.equal(amax_of_blocks(there, torch.bfloat16).cpu(), amax_of_blocks(values, torch.bfloat16))
    scales = scales_of(amax_of_blocks(there, torch.bfloat16))
    assert torch.equal(scales, whole.scales)
    for dimension in (-1, -2):
        pairs = zip(there.split(128, dimension), scales.split(1, dimension), strict=True)
        parts = [encode_blocks(part.contiguous(), own, torch.bfloat16).view(torch.uint8) for part, own in pairs]
        assert torch.equal(torch.cat(parts, dimension), whole.data.view(torch.uint8))
    actual, expected = whole.transposed(), quantize(there.bfloat16().mT, BLOCKS)
    assert torch.equal(actual.data.view(torch.uint8), expected.data.view(torch.uint8)) and actual.data.is_contiguous()
    assert torch.equal(actual.scales, expected.scales)

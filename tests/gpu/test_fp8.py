"""DeepGEMM's products against float64 of the same quantised operands, and a layer's gradients on a GPU.

Accumulation is in float32, so results differ from float64 by the rounding of bfloat16 results (2^-9) or, for weight
gradients, of float32 sums whose tensor-core part has fewer bits: 1e-3 of the whole is allowed for each.
"""

from __future__ import annotations

import pytest
import torch

from primeslurm.trainer import fp8
from primeslurm.trainer.block_fp8 import BLOCKS, COLUMNS, ROWS, backend, quantise
from tests.support import block_fp8 as exact
from tests.support.block_fp8 import OFFSETS, matrix, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels are compiled when they are first used
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs an SM90 GPU"
    ),
]
TOLERANCE = {"bfloat16": 4e-3, "float32": 1e-3}


def test_the_quantiser_is_that_of_the_cpu() -> None:
    for shape, block in (((256, 384), ROWS), ((130, 256), ROWS), ((256, 130), COLUMNS), ((3, 200, 130), BLOCKS)):
        values = matrix(*shape)
        values[..., :128, :128] = 0
        here, there = quantise(values, block), quantise(values.cuda(), block)
        torch.testing.assert_close(there.scales.cpu(), here.scales, rtol=1e-6, atol=0)
        # A last bit of a scale may tip a value over to its neighbour.
        assert (there.data.cpu().float() != here.data.float()).float().mean() < 1e-3
        strided = quantise(values.cuda().mT.contiguous().mT, block)
        assert torch.equal(strided.data.float(), there.data.float())


def test_product_and_gradients_of_a_linear_layer() -> None:
    gemm = backend("cuda")
    rows, weight, left, right = exact.operands("cuda")
    forward = gemm.product(rows, weight)
    assert relative_error(forward, rows.values(torch.float64) @ weight.values(torch.float64).T) < TOLERANCE["bfloat16"]
    gradient = quantise(matrix(384, 128, device="cuda", seed=2), ROWS)
    backward = gemm.product(gradient, weight.transposed())
    expected = gradient.values(torch.float64) @ weight.values(torch.float64)
    assert relative_error(backward, expected) < TOLERANCE["bfloat16"]
    outer = gemm.outer(left, right)
    assert relative_error(outer, left.values(torch.float64).T @ right.values(torch.float64)) < TOLERANCE["float32"]


def test_grouped_product_and_gradients_with_uneven_and_empty_groups() -> None:
    gemm = backend("cuda")
    groups, rows = exact.groups_and_rows(256, "cuda")
    upstream = exact.groups_and_rows(128, "cuda", seed=2)[1]
    weight = quantise(matrix(5, 128, 256, device="cuda", seed=1), BLOCKS)
    for a, b in ((quantise(rows, ROWS), weight), (quantise(upstream, ROWS), weight.transposed())):
        product = gemm.grouped_product(a, b, groups)[groups.places]
        assert relative_error(product, exact.exact_grouped_product(a, b, groups)) < TOLERANCE["bfloat16"]
    left, right = quantise(upstream, COLUMNS), quantise(rows, COLUMNS)
    outer = gemm.grouped_outer(left, right, groups)
    assert relative_error(outer, exact.exact_grouped_outer(left, right, groups)) < TOLERANCE["float32"]
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

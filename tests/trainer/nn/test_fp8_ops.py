"""FP8 operators for compiled layers match eager ones, in values and fake shapes."""

from __future__ import annotations

import pytest
import torch

from primeslurm.nn.kernels.fp8 import ops
from primeslurm.nn.layers import fp8

Tensors = list[torch.Tensor]


def leaves(*shapes: tuple[int, ...], transposed: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    if transposed:  # as backward passes hand weights on
        made[1] = made[1].mT.contiguous().mT
    return [tensor.requires_grad_() for tensor in made]


def with_gradients(product: torch.Tensor, inputs: Tensors) -> Tensors:
    weights = torch.randn(product.shape, generator=torch.Generator().manual_seed(2))
    return [product, *torch.autograd.grad((product * weights).sum(), inputs)]


@pytest.mark.parametrize("transposed", [False, True])
def test_compiled_linear_layers_match_eager(transposed: bool) -> None:
    inputs = leaves((2, 150, 256), (384, 256), transposed=transposed)
    mine = with_gradients(ops.linear_product(*inputs), inputs)
    for one, other in zip(mine, with_gradients(fp8.linear_product(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("counts", [[100, 0, 200], [0, 0, 300], [1, 298, 1], [128, 128, 44]])
def test_compiled_experts_match_eager(counts: list[int]) -> None:
    offsets = torch.tensor(counts).cumsum(0).int()
    inputs = leaves((300, 256), (3, 384, 256))
    mine = with_gradients(ops.grouped_product(*inputs, offsets), inputs)
    for one, other in zip(mine, with_gradients(fp8.grouped_product(*inputs, offsets), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_frozen_weights_get_no_gradient() -> None:
    rows, weight = leaves((300, 256), (3, 384, 256))
    weight.requires_grad_(False)
    offsets = torch.tensor([100, 200, 300], dtype=torch.int32)
    ops.grouped_product(rows, weight, offsets).sum().backward()
    assert rows.grad is not None and weight.grad is None


def test_fake_operators_match_real_ones() -> None:
    rows, weight, stack = leaves((300, 256), (384, 256), (3, 384, 256))
    gradient = torch.randn(300, 384)
    layout = ops._layout(torch.tensor([100, 120, 300], dtype=torch.int32), 300)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for operation, arguments in (
        (ops._linear, (rows, weight)),
        (ops._outer, (gradient, rows.detach())),
        (ops._layout, (torch.tensor([100, 120, 300], dtype=torch.int32), 300)),
        (ops._grouped, (rows, stack, *layout)),
        (ops._grouped_outer, (gradient, rows.detach(), *layout)),
    ):
        torch.library.opcheck(operation, arguments, test_utils=checks)

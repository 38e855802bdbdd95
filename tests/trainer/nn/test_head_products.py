"""Per-head products match einsum, in the order of tokens."""

from __future__ import annotations

import pytest
import torch

from primeslurm.nn.kernels.sparse_mla import head_products


@pytest.mark.parametrize("appending", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
def test_products_and_gradients_match_einsum(appending: bool, sliced: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    whole, matrices, beside = tensor(2, 5, 3, 8), tensor(3, 4, 6), tensor(2, 5, 3, 2)
    values = whole[..., 2:6] if sliced else whole[..., :4].contiguous()
    expected = torch.einsum("bqhd,hdr->bqhr", values, matrices)
    if appending:
        expected = torch.cat([expected, beside], -1)
    actual = head_products(values, matrices, beside if appending else None)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    inputs = (whole, matrices, beside) if appending else (whole, matrices)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    gradients = torch.autograd.grad((actual * weight).sum(), inputs)
    for mine, reference in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, reference)


def test_frozen_matrices_have_no_gradient() -> None:
    values, matrices = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(3, 4, 5)
    head_products(values, matrices).sum().backward()
    assert matrices.grad is None and values.grad is not None

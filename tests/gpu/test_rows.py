"""Scattered and gathered rows on a GPU equal the CPU's: each kernel, dtype, and sizes that are not powers of two."""

from __future__ import annotations

import pytest
import torch

from primeslurm.nn.kernels import rows
from tests.support.rows import inverted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "slots", "dim"), [(333, 8, 2048), (64, 2, 6144), (100, 3, 72), (7, 8, 8)])
def test_gpu_and_cpu_agree(dtype: torch.dtype, count: int, slots: int, dim: int) -> None:
    draw = torch.Generator().manual_seed(0)
    owner = torch.randperm(count * slots, generator=draw)[: count * slots // 2]
    where = inverted(owner, count, slots)
    few, many = (torch.randn(n, dim, generator=draw).to(dtype) for n in (count, len(owner)))
    weights = torch.rand(count, slots, generator=draw)

    def computed(device: str) -> list[torch.Tensor]:
        one, other, share = (tensor.clone().to(device).requires_grad_() for tensor in (few, many, weights))
        places = where.to(device), owner.to(device)
        copies, plain = rows.spread(one, *places), rows.gathered(other, *places)
        weighted = rows.gathered(other, *places, share)
        total = (copies.float() * many.to(device).float()).sum() + ((plain + weighted).float() ** 2).sum()
        return [tensor.cpu() for tensor in (copies, plain, weighted, *torch.autograd.grad(total, (one, other, share)))]

    limit = 1e-5 if dtype == torch.float32 else 5e-3
    for mine, reference in zip(computed("cuda"), computed("cpu"), strict=True):
        assert mine.dtype == reference.dtype and mine.shape == reference.shape
        assert (mine.float() - reference.float()).norm() <= limit * reference.float().norm()


def test_empty_input_is_accepted() -> None:
    where, owner = torch.full((4, 2), -1, device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    weights = torch.ones(4, 2, device="cuda", requires_grad=True)
    empty = torch.empty(0, 16, device="cuda", requires_grad=True)
    actual = rows.gathered(empty, where, owner, weights)
    assert torch.equal(actual, torch.zeros(4, 16, device="cuda"))
    actual.sum().backward()
    assert weights.grad is not None and not weights.grad.any()

"""Fake outputs of varlen attention for torch.compile. tests/gpu/test_parallel.py tests the values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan.models.common.attention import VarlenMetadata

from primeslurm.trainer.components import varlen_attention


@pytest.mark.parametrize("kernels", ["FA2", "FA3"])
@pytest.mark.parametrize(("size", "value_size"), [(192, 128), (128, 128), (64, 64)], ids=["latent", "wide", "narrow"])
def test_fake_outputs_have_the_strides_of_kernels(
    size: int, value_size: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise compiled code fails on GPUs."""
    monkeypatch.setattr(varlen_attention, "current_flash_attention_impl", lambda: kernels)
    with FakeTensorMode():
        queries, keys = (torch.empty(16, 8, size, dtype=torch.bfloat16) for _ in range(2))
        values = torch.empty(16, 8, value_size, dtype=torch.bfloat16)
        ends = torch.empty(3, dtype=torch.int32)
        out, lse = varlen_attention.flash(queries, keys, values, VarlenMetadata(ends, ends, 9, 9), None, (-1, 0))
    assert out.shape == (16, 8, value_size) and lse.shape == (8, 16)
    # FlashAttention 2 computes values as wide as keys, of which a part is taken.
    assert out.stride(1) == (size if kernels == "FA2" else value_size)

"""Dense attention masks, and fake outputs of varlen attention for torch.compile (tests/gpu tests its values)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask
from torchtitan.models.common import attention
from torchtitan.models.common.attention import VarlenMetadata

from primeslurm.nn.compat import dense
from primeslurm.trainer.components import varlen_attention

LENGTHS = ((5, 9, 2), (16,), (1, 15))
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])
PACKED = attention.get_efficient_causal_mask_mod_for_packed_document(POSITIONS)
WINDOW = attention.get_sliding_window_mask_mod(3)
RULES = (PACKED, WINDOW, and_masks(PACKED, WINDOW), attention.get_causal_mask_mod(), noop_mask)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keys", [16, 12])
def test_dense_mask_matches_its_rule(rule: Callable[..., torch.Tensor], keys: int) -> None:
    expected = create_mask(rule, len(LENGTHS), 1, 16, keys, "cpu")
    actual = dense(rule, len(LENGTHS), 16, keys, torch.device("cpu"))
    assert actual.shape == expected.shape and torch.equal(actual, expected)


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

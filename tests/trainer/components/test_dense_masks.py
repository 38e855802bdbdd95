"""Dense masks from broadcast indices match the mask rule for single pairs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask
from torchtitan.models.common import attention

from primeslurm.nn.compat import dense

LENGTHS = ((5, 9, 2), (16,), (1, 15))
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])
PACKED = attention.get_efficient_causal_mask_mod_for_packed_document(POSITIONS)
WINDOW = attention.get_sliding_window_mask_mod(3)
RULES = (PACKED, WINDOW, and_masks(PACKED, WINDOW), attention.get_causal_mask_mod(), noop_mask)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keys", [16, 12])
def test_dense_mask_matches_its_rule(rule: Callable[..., torch.Tensor], keys: int) -> None:
    asked = create_mask(rule, len(LENGTHS), 1, 16, keys, "cpu")
    found = dense(rule, len(LENGTHS), 16, keys, torch.device("cpu"))
    assert found.shape == asked.shape and torch.equal(found, asked)

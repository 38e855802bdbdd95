"""Repeated experts become unknown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from primeslurm.wire.batches.routed_experts import RoutedExperts, without_repeats
from primeslurm.wire.decoding import DamagedError

KINDS = [(np.uint8, 8, 2), (np.uint8, 256, 8), (np.uint16, 384, 8), (np.uint8, 5, 5), (np.uint16, 512, 22)]


def choices(tokens: int, layers: int, experts: int, top_k: int, dtype: Any) -> RoutedExperts:
    """Random experts that differ from one another."""
    scores = np.random.default_rng(0).random((tokens, layers, experts))
    found: RoutedExperts = scores.argpartition(top_k - 1, -1)[..., :top_k].astype(dtype)
    return found


@pytest.mark.parametrize(("dtype", "experts", "top_k"), KINDS)
def test_only_tokens_with_repeated_experts_become_unknown(dtype: Any, experts: int, top_k: int) -> None:
    rng, unknown = np.random.default_rng(1), np.iinfo(dtype).max
    routed = choices(9001, 4, experts, top_k, dtype)
    routed[:, 0] = 0
    routed[rng.random(9001) < 0.1] = unknown
    assert without_repeats(routed, (1, 2, 3), experts)[0] is routed
    damaged = routed.copy()
    for token in rng.choice(9001, 500, replace=False):
        one, other = rng.choice(top_k, 2, replace=False)
        layer = rng.integers(1, 4)
        damaged[token, layer, one] = damaged[token, layer, other]
    damaged[9000, 1:] = 0  # never recorded
    before = damaged.copy()
    found, count = without_repeats(damaged, (1, 2, 3), experts)
    repeats = [any(len(set(row)) < top_k for row in token[1:].tolist()) for token in damaged]
    assert np.array_equal(found, np.where(np.array(repeats)[:, None, None], unknown, damaged))
    assert np.array_equal(damaged, before)
    assert count == int((found != damaged).any(axis=(1, 2)).sum()) > 400


def test_layers_without_experts_are_ignored() -> None:
    routed = choices(6, 3, 8, 2, np.uint8)
    for filler in (0, 77, 255):
        routed[:, 1] = filler
        assert without_repeats(routed, (0, 2), 8)[0] is routed


def test_tokens_of_an_unrecorded_layer_become_unknown() -> None:
    routed = choices(6, 3, 8, 2, np.uint8)
    routed[:, 2] = 0
    routed[5] = 255  # the last one is unknown anyway
    found, count = without_repeats(routed, range(3), 8)
    assert (found == 255).all() and count == 5


def test_token_unknown_in_one_layer_is_unknown_in_all() -> None:
    for experts in (8, 256):
        routed = choices(6, 3, experts, 2, np.uint8)
        routed[2, 1] = 255
        found, count = without_repeats(routed, range(3), experts)
        assert count == 1 and (found[2] == 255).all() and np.array_equal(found[3:], routed[3:])


def test_single_expert_cannot_repeat() -> None:
    routed = np.zeros((4, 3, 1), np.uint8)  # expert 0 in every layer is a choice
    routed[3] = 255
    for experts in (8, 256):
        assert without_repeats(routed, range(3), experts)[0] is routed


@pytest.mark.parametrize("wrong", [[1, 8], [255, 1], [8, 9]])
def test_nonexistent_experts_are_refused(wrong: list[int]) -> None:
    routed = choices(6, 3, 8, 2, np.uint8)
    routed[4, 1] = wrong
    with pytest.raises(DamagedError, match="experts beyond the 8"):
        without_repeats(routed, range(3), 8)
    assert without_repeats(routed, (0, 2), 8)[0] is routed


def test_empty_sequence_has_no_repeats() -> None:
    routed = np.zeros((0, 3, 2), np.uint8)
    assert without_repeats(routed, range(3), 8) == (routed, 0)

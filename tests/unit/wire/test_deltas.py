"""Deltas restore a published policy bit by bit, or fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from primeslurm.trainer.weight_senders.snapshots import Snapshots
from primeslurm.wire.weight_transfer import deltas, filesystem

NAME = "model.layers.0.mlp.up_proj.weight"


def random_bits(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor [8, 32] whose bits are random, so that it has NaN and negative zero."""
    data = torch.randint(0, 256, (8, 32 * dtype.itemsize), dtype=torch.uint8, generator=torch.manual_seed(seed))
    return data.view(dtype)


def changed(tensor: torch.Tensor, elements: int, seed: int) -> torch.Tensor:
    """Return a copy in which some elements have other bits."""
    bits = tensor.clone().view(torch.uint8)
    places = torch.randperm(tensor.numel(), generator=torch.manual_seed(seed))[:elements]
    bits.view(-1, tensor.itemsize)[places, 0] ^= 1
    return bits.view(tensor.dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [0, 1, 20, 256])
def test_every_bit_is_restored(dtype: torch.dtype, elements: int) -> None:
    base = random_bits(dtype, seed=1)
    new = changed(base, elements, seed=2)
    stored = deltas.changes(NAME, new, base)
    assert set(stored) <= set(deltas.keys(NAME))
    assert same(deltas.restored(NAME, base, stored, deltas.digest(new)), new)
    assert sum(part.nbytes for part in stored.values()) == min(elements * (4 + dtype.itemsize), new.nbytes)


def test_negative_zero_is_a_change_and_equal_nan_is_none() -> None:
    base = torch.tensor([0.0, float("nan"), 1.0, *[2.0] * 9], dtype=torch.bfloat16)
    new = base.clone()
    new[0] = -0.0
    stored = deltas.changes(NAME, new, base)
    assert [part.numel() for part in stored.values()] == [1, 1]
    assert same(deltas.restored(NAME, base, stored, deltas.digest(new)), new)


def test_engine_that_missed_versions_needs_the_newest_delta_only() -> None:
    base = random_bits(torch.bfloat16, seed=3)
    versions = [base]
    for seed in range(4, 7):
        versions.append(changed(versions[-1], 9, seed))
    newest = versions[-1]
    assert same(deltas.restored(NAME, base, deltas.changes(NAME, newest, base), deltas.digest(newest)), newest)


def test_damaged_delta_is_refused() -> None:
    base = random_bits(torch.bfloat16, seed=7)
    new = changed(base, 9, seed=8)
    stored, expected = deltas.changes(NAME, new, base), deltas.digest(new)
    _, indices, values = deltas.keys(NAME)
    damaged = {
        "wrong value": stored | {values: stored[values] ^ 1},
        "wrong place": stored | {indices: stored[indices].flip(0)},
        "place outside": stored | {indices: stored[indices] + 2**20},
        "truncated": stored | {values: stored[values][:-1]},
        "lost": {},
    }
    for parts in damaged.values():
        with pytest.raises(deltas.DeltaError, match=NAME):
            deltas.restored(NAME, base, parts, expected)
    with pytest.raises(deltas.DeltaError, match="the delta or its base is damaged"):
        deltas.restored(NAME, changed(base, 1, seed=9), stored, expected)  # another base
    with pytest.raises(deltas.DeltaError, match="instead of None"):
        deltas.restored(NAME, base, stored, None)


def test_a_version_is_whole_if_it_is_first_or_of_a_checkpoint_or_deltas_have_become_dear() -> None:
    snapshots = Snapshots(lambda version: version % 10 == 0)
    bases = {}
    for version in range(3, 24):
        bases[version] = base = snapshots.base_of(version)
        snapshots.published(version, base, 100 if base is None else 10 * (version - base))
    whole = [version for version, base in bases.items() if base is None]
    assert whole == [3, 8, 10, 15, 20]
    assert all(base is None or max(v for v in whole if v < version) == base for version, base in bases.items())


def test_a_version_that_is_published_again_is_not_its_own_base() -> None:
    snapshots = Snapshots(lambda version: False)
    snapshots.published(5, None, 100)
    assert snapshots.base_of(6) == 5
    assert snapshots.base_of(5) is None


def test_base_of_a_kept_delta_is_kept(tmp_path: Path) -> None:
    bases = {1: None, 2: None, 3: 2, 4: 2, 5: None, 6: 5, 7: 5, 8: 5}
    for version, base in bases.items():
        directory = filesystem.version_dir(tmp_path, version)
        directory.mkdir(parents=True)
        filesystem.complete(directory, version, "bfloat16", layout="delta" if base else "hf", base=base)
    assert filesystem.base_of(filesystem.version_dir(tmp_path, 4)) == (filesystem.version_dir(tmp_path, 2), 2)
    assert filesystem.base_of(filesystem.version_dir(tmp_path, 2)) is None
    assert filesystem.prune(tmp_path, keep=2, needed={4}) == [1, 3, 6]
    assert filesystem.prune(tmp_path, keep=2, needed=set()) == [2, 4]
    assert filesystem.published(tmp_path) == [5, 7, 8]

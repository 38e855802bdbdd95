"""Which published policies count as complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from primeslurm.inference.weight_receivers.filesystem_receiver import policy_files, restored, tensor_names
from primeslurm.inference.weight_receivers.layerwise import PolicyError
from primeslurm.wire.weight_transfer import deltas, filesystem
from tests.support.faulty_storage import FaultyStorage, storage_time  # noqa: F401 - for all tests
from tests.support.models import publish, publish_delta

pytestmark = pytest.mark.engine


@pytest.fixture
def policy(model: Path, tmp_path: Path) -> Path:
    return publish(model, tmp_path, 3)


def test_a_complete_policy(policy: Path, model: Path) -> None:
    files = policy_files(policy, 3)
    assert [file.parent for file in files] == [policy]
    assert tensor_names(files) == tensor_names(sorted(model.glob("*.safetensors")))


def test_policy_that_becomes_visible_late_is_complete(policy: Path) -> None:
    storage, looks = FaultyStorage(policy.parent, hidden={"MANIFEST.json"}), []

    def rule(operation: str, path: str) -> None:
        looks.append(path)
        storage.hidden = {"MANIFEST.json"} if len(looks) < 5 else set()

    storage.fail = rule
    with storage.installed():
        assert policy_files(policy, 3)
    assert len(looks) >= 5


def test_model_directory_is_not_a_policy(model: Path) -> None:
    with pytest.raises(PolicyError, match="no readable MANIFEST"):
        policy_files(model, 0)


def test_another_version_is_refused(policy: Path) -> None:
    with pytest.raises(PolicyError, match="has version 3, expected 4"):
        policy_files(policy, 4)


def test_missing_or_truncated_file_is_refused(policy: Path) -> None:
    file = next(policy.glob("*.safetensors"))
    with file.open("r+b") as handle:
        handle.truncate(100)
    with pytest.raises(PolicyError, match="has 100 bytes"):
        policy_files(policy, 3)
    file.unlink()
    with pytest.raises(PolicyError, match="has None bytes"):
        policy_files(policy, 3)


def test_a_policy_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    filesystem.complete(tmp_path, 3, "float32")
    with pytest.raises(PolicyError, match="names no safetensors"):
        policy_files(tmp_path, 3)


def test_a_delta_is_restored_and_a_damaged_one_refused(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "changed").mkdir()
    delta = publish_delta(tmp_path, 5, 3, tmp_path / "changed")
    (base,), (file,) = policy_files(policy, 3), policy_files(delta, 5)
    expected = load_file(tmp_path / "changed" / file.name)
    actual = dict(restored([base], [file]))
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
    # Files of two ranks, each with parts of all layers
    ranks = [dict(list(load_file(base).items())[rank::2]) for rank in range(2)]
    for rank, tensors in enumerate(ranks):
        save_file(tensors, tmp_path / f"{rank}.safetensors")
    names = [name for name, _ in restored([tmp_path / "0.safetensors", tmp_path / "1.safetensors"], [file])]
    layers = [name.split(".")[2] for name in names if name.startswith("model.layers.")]
    assert set(names) == expected.keys() and len({*layers}) > 1 and layers == sorted(layers, key=int)
    with safe_open(file, framework="pt") as handle:
        digests = handle.metadata()
    stored = load_file(file)
    stored[next(key for key in stored if key.endswith("values"))] ^= 1
    save_file(stored, file, digests)
    with pytest.raises(PolicyError, match=r"v000005: .* is damaged"):
        dict(restored([base], [file]))


def test_a_delta_without_changes_is_the_base(policy: Path, tmp_path: Path) -> None:
    """A rank whose tensors are all unchanged writes a file that has digests but no tensors."""
    (base,), delta = policy_files(policy, 3), tmp_path / "delta.safetensors"
    before = load_file(base)
    save_file({}, delta, {name: deltas.digest(tensor) for name, tensor in before.items()})
    after = dict(restored([base], [delta]))
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)

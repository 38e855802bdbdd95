"""Location of a model: a directory, or the snapshot that huggingface_hub would use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from primeslurm.base.model_files import ModelNotFoundError, locate, model_directory

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two snapshots of org/name. `main` is the older one."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    directory = tmp_path / "models--org--name"
    for commit, written in ((OLD, 1000), (NEW, 2000)):
        snapshot = directory / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        os.utime(snapshot, (written, written))
    (directory / "refs").mkdir()
    (directory / "refs" / "main").write_text(OLD)
    return directory


def test_directory_is_located_as_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert locate(str(tmp_path / "link")) == tmp_path.resolve()


def test_snapshot_of_main_is_preferred_to_the_newest(cached: Path) -> None:
    assert locate("org/name") == model_directory("org/name") == cached / "snapshots" / OLD


def test_missing_models_are_errors(cached: Path) -> None:
    for path, why in (("org/other", "not in the Hugging Face cache"), ("./x", "not in the Hugging Face cache")):
        with pytest.raises(ModelNotFoundError) as caught:
            locate(path)
        assert caught.value.why == why and path in str(caught.value)
    (cached / "refs" / "main").unlink()
    with pytest.raises(ModelNotFoundError, match="as `main`"):
        locate("org/name")
    assert model_directory("org/name") is None


@pytest.mark.parametrize(
    ("listed", "complete"),
    [(("config.json", "original/model.safetensors", "x.png"), True), (("config.json", "model.safetensors"), False)],
)
def test_incomplete_download_is_an_error_unless_only_unused_files_are_missing(
    cached: Path, listed: tuple[str, ...], complete: bool
) -> None:
    tree = cached / "trees" / f"{OLD}.json"
    tree.parent.mkdir()
    tree.write_text(json.dumps({"format_version": 1, "files": {name: {"size": 2, "blob_id": OLD} for name in listed}}))
    if complete:
        assert locate("org/name") == cached / "snapshots" / OLD
        return
    with pytest.raises(ModelNotFoundError, match="not complete"):
        locate("org/name")

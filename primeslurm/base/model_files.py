"""Where a model's files are: a directory, or what the Hugging Face cache has of a hub id. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from primeslurm.base.paths import expanded, is_dir

INDEX = "model.safetensors.index.json"
"""Says which file of a model each tensor is in."""
_NEEDED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""A snapshot without other files (images, weights in other formats) is complete."""


class ModelNotFoundError(FileNotFoundError):
    """No directory, and `why` says what is wrong with the cache: "not in the Hugging Face cache", for one."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"model {path}: no such directory, and {why}")
        self.why = why


def model_directory(path: str) -> Path | None:
    """The directory that a model path or hub id means on this file system; None if it is not there."""
    try:
        return locate(path)
    except ModelNotFoundError:
        return None


def locate(path: str) -> Path:
    """The directory that a model path or hub id means on this file system.

    Raises:
        ModelNotFoundError: it is not there, or not all of it.
    """
    directory = expanded(path)
    if is_dir(directory):
        return directory.resolve()
    from huggingface_hub import constants

    in_cache = Path(constants.HF_HUB_CACHE) / f"models--{path.replace('/', '--')}"
    if not is_dir(in_cache):  # asking the hub's library would take 0.2 s of imports
        raise ModelNotFoundError(path, "not in the Hugging Face cache")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True, allow_patterns=list(_NEEDED), ignore_patterns="*/*"))
    except IncompleteSnapshotError as error:
        raise ModelNotFoundError(path, "not complete in the Hugging Face cache") from error
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelNotFoundError(path, "not in the Hugging Face cache as `main`") from error

"""Finds the local directory of a model: a path, or a hub id in the Hugging Face cache. It downloads nothing."""

from __future__ import annotations

from pathlib import Path

from primeslurm.base.paths import expanded, is_dir

# Name of the file that maps tensors to safetensors files.
INDEX = "model.safetensors.index.json"
# Files that a complete snapshot has. Other files, such as images, may be missing.
_NEEDED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


class ModelNotFoundError(FileNotFoundError):
    """Neither a directory nor in the cache. `why` is the problem with the cache: "not in the Hugging Face cache"."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"model {path}: no such directory, and {why}")
        self.why = why


def model_directory(path: str) -> Path | None:
    """Return the local directory of a model path or hub id; None if there is none."""
    try:
        return locate(path)
    except ModelNotFoundError:
        return None


def locate(path: str) -> Path:
    """Return the local directory of a model path or hub id. Raise ModelNotFoundError if it is missing or incomplete."""
    directory = expanded(path)
    if is_dir(directory):
        return directory.resolve()
    from huggingface_hub import constants

    in_cache = Path(constants.HF_HUB_CACHE) / f"models--{path.replace('/', '--')}"
    if not is_dir(in_cache):  # saves the 0.2 s that importing the hub's library takes
        raise ModelNotFoundError(path, "not in the Hugging Face cache")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True, allow_patterns=list(_NEEDED), ignore_patterns="*/*"))
    except IncompleteSnapshotError as error:
        raise ModelNotFoundError(path, "not complete in the Hugging Face cache") from error
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelNotFoundError(path, "not in the Hugging Face cache as `main`") from error

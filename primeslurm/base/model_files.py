"""Local directories of models, and the headers of their safetensors files. It downloads nothing, and needs no torch."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from primeslurm.base import files
from primeslurm.base.paths import expanded, is_dir

# Name of the file that maps tensors to safetensors files.
INDEX = "model.safetensors.index.json"
# Files that a complete snapshot has. Other files, such as images, may be missing.
_NEEDED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_LENGTH = 8
# Limit of the safetensors library
_LONGEST_HEADER = 100_000_000
_Size = Annotated[int, msgspec.Meta(ge=0)]


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


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]  # tensor name to file name


class StoredTensor(msgspec.Struct, frozen=True):
    """An entry in the header of a safetensors file."""

    dtype: str  # name in the safetensors format, such as BF16
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]  # begin and end, relative to the end of the header [bytes]


# Made at import: a second thread that uses a type while msgspec first inspects it may crash.
_INDEX = msgspec.json.Decoder(_Index)
_TENSOR = msgspec.json.Decoder(StoredTensor)
_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNREADABLE = (ValueError, msgspec.MsgspecError, RecursionError)


def weight_files(directory: Path) -> list[str]:
    """Return the safetensors files of a model: those in its index, or all. Raises OSError, and ValueError."""
    index = directory / INDEX
    if not files.is_file(index):
        return [file.name for file in files.listing(directory, "*.safetensors")]
    try:
        return sorted(set(_INDEX.decode(files.read_bytes(index)).weight_map.values()))
    except _UNREADABLE as error:
        raise ValueError(f"{index} is damaged: {error}") from error


def read_header(path: Path) -> tuple[int, dict[str, StoredTensor]]:
    """Return where the data of a safetensors file begins [bytes], and its tensors by name.

    Raises OSError, and ValueError if the file is damaged.
    """

    def read(file: BinaryIO) -> tuple[int, int, bytes]:
        size, beginning = os.fstat(file.fileno()).st_size, file.read(_LENGTH)
        length = struct.unpack("<Q", beginning)[0] if len(beginning) == _LENGTH else size
        if length > min(size - _LENGTH, _LONGEST_HEADER):
            raise ValueError(f"{path}: not a safetensors file, or truncated")
        return size, _LENGTH + length, file.read(length)

    # Not with the safetensors library: login nodes may have the base install, which does not include it.
    size, start, header = files.reading(path, read)
    try:
        entries = {name: raw for name, raw in _HEADER.decode(header).items() if name != "__metadata__"}
        tensors = {name: _TENSOR.decode(raw) for name, raw in entries.items()}
    except _UNREADABLE as error:
        raise ValueError(f"{path}: cannot read its header: {error}") from error
    end = start + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size < end:
        raise ValueError(f"{path}: truncated, {size} bytes of {end}")
    return start, tensors

"""The safetensors files of a model directory: where each tensor is, and reading parts of it by their place.

The format: eight bytes that say how long the header is, the header in JSON, then the tensors, each in C order.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from primeslurm.trainer.distributed.world import World
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

INDEX = "model.safetensors.index.json"
_LENGTH = 8
_LONGEST_HEADER = 100_000_000
"""As safetensors' own reader has it."""
_AT_ONCE = 8
"""Headers that are read side by side: each is a wait for the file system, and hardly any work."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Place(NamedTuple):
    """Where a tensor is, and what it is."""

    file: str
    offset: int
    """Bytes from the beginning of the file."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of what is stored."""
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a model directory, by name."""

    directory: Path
    places: dict[str, Place]

    @classmethod
    def read(cls, directory: Path) -> TensorFiles:
        """Read the header of each file once: of those that the index names, of all where there is none.

        Raises:
            OSError: a file is missing or cannot be read.
            ValueError: a file is no safetensors file, or is cut short.
        """
        names = _file_names(directory)
        with ThreadPoolExecutor(_AT_ONCE, "headers") as threads:
            headers = list(threads.map(lambda name: _header(directory / name), names))
        return cls(directory, {name: place for header in headers for name, place in header.items()})

    @classmethod
    def shared(cls, directory: Path, world: World) -> TensorFiles:
        """The same on every rank, read by the first. A collective.

        Raises:
            OSError: on every rank, as for `read`.
            ValueError: likewise.
        """
        found: TensorFiles | Exception | None = None
        if world.is_main:
            try:
                found = cls.read(directory)
            except (OSError, ValueError) as error:
                found = error
        found = world.share(found)
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found

    def fp8_names(self) -> frozenset[str]:
        """The names of the weights that are stored in FP8 with scales."""
        return frozenset(name for name in self.places if name + FP8_SCALE in self.places)


class OpenFiles:
    """Reads parts of tensors, from several threads if need be; each file is opened once, when it is first read."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> OpenFiles:
        """Return it: it closes at the end of the body."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close what was opened."""
        for file in self._open.values():
            os.close(file)

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor as it is stored. Raises OSError."""
        shape = self._files.places[name].shape
        return self.part(name, 0, math.prod(shape)).view(shape)

    def part(self, name: str, first: int, count: int, space: NDArray[np.uint8] | None = None) -> torch.Tensor:
        """Read elements of a tensor that follow one another.

        Args:
            name: of the tensor.
            first: number of the first element, in C order.
            count: how many.
            space: where they are put, if they fit; the next that is put there replaces them.

        Returns:
            [count], in the dtype that they are stored in.

        Raises:
            OSError: the file cannot be read, or ends too early.
        """
        place = self._files.places[name]
        if not count:
            return torch.empty(0, dtype=place.torch_dtype)  # numpy's empty arrays have strides that torch refuses
        width = place.torch_dtype.itemsize
        data = np.empty(count * width, np.uint8) if space is None or len(space) < count * width else space
        data = data[: count * width]
        left, offset = data.data, place.offset + first * width
        while left:
            done = os.preadv(self._descriptor(place.file), [left], offset)
            if not done:
                raise OSError(f"{self._files.directory / place.file}: ends {len(left)} bytes too early")
            offset, left = offset + done, left[done:]
        return torch.from_numpy(data).view(place.torch_dtype)

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(self._files.directory / file, os.O_RDONLY | os.O_CLOEXEC)
            return self._open[file]


def _file_names(directory: Path) -> list[str]:
    index = directory / INDEX
    if index.is_file():
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    return sorted(file.name for file in directory.glob("*.safetensors"))


def _header(path: Path) -> dict[str, Place]:
    with path.open("rb") as file:
        size, beginning = os.fstat(file.fileno()).st_size, file.read(_LENGTH)
        length = struct.unpack("<Q", beginning)[0] if len(beginning) == _LENGTH else size
        if length > min(size - _LENGTH, _LONGEST_HEADER):
            raise ValueError(f"{path}: no safetensors file, or cut short")
        entries: dict[str, Any] = json.loads(file.read(length))
    start = _LENGTH + length
    entries.pop("__metadata__", None)
    end = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size < end:
        raise ValueError(f"{path}: cut short, {size} bytes of {end}")
    if unknown := sorted({entry["dtype"] for entry in entries.values()} - set(_DTYPES)):
        raise ValueError(f"{path}: tensors of dtype {', '.join(unknown)} are not read")
    return {
        name: Place(path.name, start + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in entries.items()
    }

"""The safetensors files of a model directory: where each weight is, and reading parts of it by their place."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from primeslurm.base import files
from primeslurm.base.model_files import INDEX
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.weights.four_bits import FourBits, unpacked
from primeslurm.trainer.weights.safetensors_header import TensorLocation, read_header
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

_AT_ONCE = 8
"""Headers that are read side by side: each is a wait for the file system, and hardly any work."""


class _Index(msgspec.Struct, frozen=True):
    """What of an index is read."""

    weight_map: dict[str, str]
    """Tensor name to file name."""


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a model directory, by name."""

    directory: Path
    places: dict[str, TensorLocation]
    """Of a weight in four bits, where its codes are: bytes, under the name of the weight."""
    four_bits: dict[str, FourBits] = field(default_factory=dict)
    """What else there is of these weights."""

    @classmethod
    def read(cls, directory: Path) -> TensorFiles:
        """Read the header of each file once: of those that the index names, of all where there is none.

        Raises:
            OSError: a file is missing or cannot be read.
            ValueError: a file is no safetensors file, or is cut short.
        """
        names = _file_names(directory)
        with ThreadPoolExecutor(_AT_ONCE, "headers") as threads:
            headers = list(threads.map(lambda name: read_header(directory / name), names))
        return cls(directory, *unpacked({name: place for header in headers for name, place in header.items()}))

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
        return self.at(self._files.places[name], first, count, space)

    def at(self, place: TensorLocation, first: int, count: int, space: NDArray[np.uint8] | None = None) -> torch.Tensor:
        """As `part`, of what is in a place. Raises OSError."""
        if not count:
            return torch.empty(0, dtype=place.torch_dtype)  # numpy's empty arrays have strides that torch refuses
        width = place.torch_dtype.itemsize
        data = np.empty(count * width, np.uint8) if space is None or len(space) < count * width else space
        data = data[: count * width]
        path = self._files.directory / place.file
        files.retrying(path, lambda: self._read(place.file, data.data, place.offset + first * width))
        return torch.from_numpy(data).view(place.torch_dtype)

    def _read(self, file: str, left: memoryview, offset: int) -> None:
        try:
            while left:
                done = os.preadv(self._descriptor(file), [left], offset)
                if not done:
                    raise OSError(f"{self._files.directory / file}: ends {len(left)} bytes too early")
                offset, left = offset + done, left[done:]
        except OSError as error:
            if files.is_transient(error):  # the descriptor of a stale file stays stale
                with self._lock:
                    self._open.pop(file, None)
            raise

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                path = self._files.directory / file
                self._open[file] = files.retrying(path, lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            return self._open[file]


def _file_names(directory: Path) -> list[str]:
    index = directory / INDEX
    if files.is_file(index):
        try:
            return sorted(set(decode_json(files.read_bytes(index), _Index).weight_map.values()))
        except DamagedError as error:
            raise ValueError(f"{index}: cannot be read: {error}") from error
    return [file.name for file in files.listing(directory, "*.safetensors")]

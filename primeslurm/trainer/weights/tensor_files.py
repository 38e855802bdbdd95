"""The safetensors files of a model directory: location of each weight, and reads of byte ranges."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from primeslurm.base import files
from primeslurm.base.model_files import weight_files
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.weights.four_bits import FourBits, unpacked
from primeslurm.trainer.weights.safetensors_header import TensorLocation, read_header
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

# Number of headers that are read in parallel. Each mostly waits for the file system.
_PARALLEL_HEADERS = 8


@dataclass(frozen=True)
class TensorFiles:
    """Index of the weights of a model directory: the file and the format of each."""

    directory: Path
    places: dict[str, TensorLocation]
    """Locations by weight name. For a four-bit weight, the location of its codes as bytes."""
    four_bits: dict[str, FourBits] = field(default_factory=dict)  # formats of the four-bit weights

    @classmethod
    def read(cls, directory: Path) -> TensorFiles:
        """Read the headers of the files in the index, or of all files if there is no index. Raises as `read_header`."""
        names = weight_files(directory)
        with ThreadPoolExecutor(_PARALLEL_HEADERS, "headers") as threads:
            headers = list(threads.map(lambda name: read_header(directory / name), names))
        return cls(directory, *unpacked({name: place for header in headers for name, place in header.items()}))

    @classmethod
    def shared(cls, directory: Path, world: World) -> TensorFiles:
        """Read the headers on rank 0, and return them on every rank. A collective. Every rank raises as `read`."""
        result: TensorFiles | Exception | None = None
        if world.is_main:
            try:
                result = cls.read(directory)
            except (OSError, ValueError) as error:
                result = error
        result = world.share(result)
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return result

    def fp8_names(self) -> frozenset[str]:
        """Return the names of the weights that are stored in FP8 with scales."""
        return frozenset(name for name in self.places if name + FP8_SCALE in self.places)


class OpenFiles:
    """Thread-safe reads of byte ranges of tensors. Each file is opened at its first read."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            os.close(file)

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor in its stored dtype. Raises OSError."""
        shape = self._files.places[name].shape
        return self.part(name, 0, math.prod(shape)).view(shape)

    def part(self, name: str, first: int, count: int, space: NDArray[np.uint8] | None = None) -> torch.Tensor:
        """Read `count` elements of a tensor from flat index `first`, in the stored dtype. Raises OSError.

        The result is in `space` if that is large enough.
        """
        return self.at(self._files.places[name], first, count, space)

    def at(self, place: TensorLocation, first: int, count: int, space: NDArray[np.uint8] | None = None) -> torch.Tensor:
        """Read consecutive elements at a location, as `part` does."""
        if not count:
            return torch.empty(0, dtype=place.torch_dtype)  # torch rejects the strides of numpy's empty arrays
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
                    raise OSError(f"{self._files.directory / file}: truncated by {len(left)} bytes")
                offset, left = offset + done, left[done:]
        except OSError as error:
            if files.is_transient(error):  # the descriptor of a stale NFS file stays stale, so open it again
                with self._lock:
                    self._open.pop(file, None)
            raise

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                path = self._files.directory / file
                self._open[file] = files.retrying(path, lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            return self._open[file]

"""The header of a safetensors file: what tensors it has, and where.

The format: eight bytes that say how long the header is, the header in JSON, then the tensors, each in C order.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import torch

from primeslurm.base import files
from primeslurm.wire.decoding import DamagedError, Size, decode_json

_LENGTH = 8
_LONGEST_HEADER = 100_000_000
"""As safetensors' own reader has it."""
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


class TensorLocation(NamedTuple):
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


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in a header."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]
    """Bytes from the end of the header."""


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Find the tensors of a file by its header.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file, or is cut short.
    """

    def read(file: BinaryIO) -> tuple[int, int, bytes]:
        size, beginning = os.fstat(file.fileno()).st_size, file.read(_LENGTH)
        length = struct.unpack("<Q", beginning)[0] if len(beginning) == _LENGTH else size
        if length > min(size - _LENGTH, _LONGEST_HEADER):
            raise ValueError(f"{path}: no safetensors file, or cut short")
        return size, length, file.read(length)

    size, length, header = files.reading(path, read)
    start = _LENGTH + length
    entries = _entries(path, header)
    end = start + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size < end:
        raise ValueError(f"{path}: cut short, {size} bytes of {end}")
    if unknown := sorted({entry.dtype for entry in entries.values()} - set(_DTYPES)):
        raise ValueError(f"{path}: tensors of dtype {', '.join(unknown)} are not read")
    found = {
        name: TensorLocation(path.name, start + entry.data_offsets[0], entry.shape, entry.dtype)
        for name, entry in entries.items()
    }
    for name, entry in entries.items():  # room is made for what a shape says
        if found[name].nbytes != entry.data_offsets[1] - entry.data_offsets[0]:
            raise ValueError(f"{path}: {name} of {entry.dtype}{list(entry.shape)} is not at {list(entry.data_offsets)}")
    return found


def _entries(path: Path, header: bytes) -> dict[str, _Entry]:
    try:
        found = decode_json(header, dict[str, msgspec.Raw])
        return {name: decode_json(bytes(raw), _Entry) for name, raw in found.items() if name != "__metadata__"}
    except DamagedError as error:
        raise ValueError(f"{path}: its header cannot be read: {error}") from error

"""Read the header of a safetensors file: names, dtypes, shapes and offsets of its tensors."""

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
# Limit of the safetensors library
_LONGEST_HEADER = 100_000_000
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
    """Location, shape and dtype of a stored tensor."""

    file: str
    offset: int  # offset from the start of the file [bytes]
    shape: tuple[int, ...]
    dtype: str  # name in the safetensors format, such as BF16

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


class _Entry(msgspec.Struct, frozen=True):
    """A header entry."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]  # begin and end, relative to the end of the header [bytes]


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Return the locations of all tensors of a file. Raises OSError, and ValueError if the file is damaged."""

    # The safetensors library maps files into memory. Offsets let loading read byte ranges into pinned buffers with
    # `preadv`, retry after errors of network file systems (which kill a process that uses a mapping), and check all
    # sizes before it allocates memory.
    def read(file: BinaryIO) -> tuple[int, int, bytes]:
        size, beginning = os.fstat(file.fileno()).st_size, file.read(_LENGTH)
        length = struct.unpack("<Q", beginning)[0] if len(beginning) == _LENGTH else size
        if length > min(size - _LENGTH, _LONGEST_HEADER):
            raise ValueError(f"{path}: not a safetensors file, or truncated")
        return size, length, file.read(length)

    size, length, header = files.reading(path, read)
    start = _LENGTH + length
    entries = _entries(path, header)
    end = start + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size < end:
        raise ValueError(f"{path}: truncated, {size} bytes of {end}")
    if unknown := sorted({entry.dtype for entry in entries.values()} - set(_DTYPES)):
        raise ValueError(f"{path}: unsupported dtype {', '.join(unknown)}")
    locations = {
        name: TensorLocation(path.name, start + entry.data_offsets[0], entry.shape, entry.dtype)
        for name, entry in entries.items()
    }
    for name, entry in entries.items():  # loading allocates memory by the shape, so it must match the stored bytes
        if locations[name].nbytes != entry.data_offsets[1] - entry.data_offsets[0]:
            raise ValueError(
                f"{path}: {name} ({entry.dtype}{list(entry.shape)}) does not fill its "
                f"offsets {list(entry.data_offsets)}"
            )
    return locations


def _entries(path: Path, header: bytes) -> dict[str, _Entry]:
    try:
        entries = decode_json(header, dict[str, msgspec.Raw])
        return {name: decode_json(bytes(raw), _Entry) for name, raw in entries.items() if name != "__metadata__"}
    except DamagedError as error:
        raise ValueError(f"{path}: cannot read its header: {error}") from error

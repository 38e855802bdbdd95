"""Read the header of a safetensors file: names, dtypes, shapes and offsets of its tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from primeslurm.base import model_files

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


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Return the locations of all tensors of a file. Raises OSError, and ValueError if the file is damaged."""
    # The safetensors library maps files into memory. Offsets let loading read byte ranges into pinned buffers with
    # `preadv`, retry after errors of network file systems (which kill a process that uses a mapping), and check all
    # sizes before it allocates memory.
    start, tensors = model_files.read_header(path)
    if unknown := sorted({tensor.dtype for tensor in tensors.values()} - set(_DTYPES)):
        raise ValueError(f"{path}: unsupported dtype {', '.join(unknown)}")
    locations = {
        name: TensorLocation(path.name, start + tensor.data_offsets[0], tensor.shape, tensor.dtype)
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():  # loading allocates memory by the shape, so it must match the stored bytes
        begin, end = tensor.data_offsets
        if locations[name].nbytes != end - begin:
            what = f"{name} ({tensor.dtype}{list(tensor.shape)})"
            raise ValueError(f"{path}: {what} does not fill its offsets {[begin, end]}")
    return locations

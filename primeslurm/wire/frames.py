"""Arrays on the wire: one msgpack header and the raw buffers beside it, without copies on the way in.

A message is `[header, buffer, buffer, ...]`: the header names each array's dtype and shape in the order of the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Frame = bytes | memoryview
Arrays = dict[str, NDArray[Any]]


class ArraySpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _Header(msgspec.Struct, frozen=True):
    meta: msgspec.Raw
    arrays: tuple[ArraySpec, ...]


def encode(meta: Any, arrays: Mapping[str, NDArray[Any]] = {}) -> list[Frame]:
    """Encode `meta` and named arrays as frames, ready for `send_multipart(copy=False)`.

    Args:
        meta: anything that msgspec encodes.
        arrays: by name; a contiguous one is not copied.
    """
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    specs = tuple(ArraySpec(name, array.dtype.str, array.shape) for name, array in contiguous.items())
    header = _Header(msgspec.Raw(msgspec.msgpack.encode(meta)), specs)
    buffers = [array.reshape(-1).view(np.uint8).data for array in contiguous.values()]
    return [msgspec.msgpack.encode(header), *buffers]


def decode(frames: Sequence[Any], kind: type[T]) -> tuple[T, Arrays]:
    """Decode what `encode` made. Arrays are read-only views of the frames.

    Args:
        frames: of one message.
        kind: type of `meta`.

    Raises:
        ValueError: the frames do not match their header.
    """
    header = msgspec.msgpack.decode(frames[0], type=_Header)
    if len(frames) != len(header.arrays) + 1:
        raise ValueError(f"{len(frames) - 1} buffers, but the header names {len(header.arrays)}")
    arrays: Arrays = {}
    for spec, frame in zip(header.arrays, frames[1:], strict=True):
        arrays[spec.name] = np.frombuffer(frame, dtype=np.dtype(spec.dtype)).reshape(spec.shape)
    return msgspec.msgpack.decode(header.meta, type=kind), arrays

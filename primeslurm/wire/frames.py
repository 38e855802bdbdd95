"""Arrays on the wire: one msgpack header and the raw buffers beside it, without copies on the way in.

A message is `[header, buffer, buffer, ...]`: the header names each array's dtype and shape in the order of the buffers.
Whatever comes in is decoded to what its reader was promised, or refused with a DamagedError. No length that a message
states is believed: memory follows from the bytes that are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Frame = bytes | memoryview
Arrays = dict[str, NDArray[Any]]

MOST_AXES = 8
"""Of an array; the most that anything here has is 4: [rows, seq_len, layers, top_k]."""
Size = Annotated[int, msgspec.Meta(ge=0)]


class DamagedError(ValueError):
    """What came in is not what its protocol says. The one exception of all decoders of the wire."""


class ArraySpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one buffer."""

    name: str
    dtype: Annotated[str, msgspec.Meta(pattern=r"^[<|][biuf][1248]$")]
    """Numbers alone, as numpy writes them: nothing that is parsed any further, and no objects."""
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MOST_AXES)]


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
        DamagedError: the frames do not match their header, or the header is damaged.
    """
    if not frames:
        raise DamagedError("a message without a header")
    header = value(frames[0], _Header)
    if len(frames) != len(header.arrays) + 1:
        raise DamagedError(f"{len(frames) - 1} buffers, but the header names {len(header.arrays)}")
    arrays: Arrays = {}
    for spec, frame in zip(header.arrays, frames[1:], strict=True):
        if spec.name in arrays:
            raise DamagedError(f"two arrays {spec.name[:40]!r}")
        arrays[spec.name] = _array(spec, frame)
    return value(header.meta, kind), arrays


def value(data: Any, kind: type[T]) -> T:
    """Decode one msgpack value.

    Raises:
        DamagedError: it is not one of this kind.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error


def _array(spec: ArraySpec, frame: Any) -> NDArray[Any]:
    raw = np.frombuffer(frame, np.uint8)
    try:
        dtype = np.dtype(spec.dtype)
        if len(raw) != math.prod(spec.shape) * dtype.itemsize:
            raise DamagedError(f"{len(raw)} bytes for {spec.name[:40]!r}, {spec.dtype}{list(spec.shape)}")
        if dtype.kind == "b" and raw.max(initial=0) > 1:
            raise DamagedError(f"{spec.name[:40]!r} has booleans that are neither")
        return raw.view(dtype).reshape(spec.shape)
    except (TypeError, ValueError) as error:  # not a dtype after all, or more places than numpy can count
        raise error if isinstance(error, DamagedError) else DamagedError(f"{spec.name[:40]!r}: {error}") from error

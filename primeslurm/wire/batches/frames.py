"""Arrays on the wire: a message is `[header, buffer, buffer, ...]`.

The header is msgpack with metadata and the name, dtype and shape of each array, in the order of the buffers. Buffers
are the raw bytes of the arrays. Neither sender nor receiver copies them.

A trainer that gets a negative token or an array of another length does not refuse it: it crashes, or learns nonsense.
Therefore names, dtypes and shapes are checked before anything computes with the arrays of a rollout or a batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from primeslurm.wire.decoding import DamagedError, Size, decode_msgpack

T = TypeVar("T")
Frame = bytes | memoryview
Arrays = dict[str, NDArray[Any]]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
MAX_AXES = 8  # Maximum number of axes of an array. The largest used is 3: [tokens, layers, top_k].
MAX_AXIS = 1024  # maximum number of layers of a model and of choices per layer, because memory is allocated by them
_DTYPES = {
    **dict.fromkeys(("token_ids", "positions", "branches", "versions"), ("i4",)),
    **dict.fromkeys(("mask", "on_policy", "observed"), ("b1",)),
    **dict.fromkeys(("logprobs", "advantages", "temperatures", "echo_weights", "ref_logprobs"), ("f4",)),
    "routed_experts": ("u1", "u2"),
}
# `versions`: tag of the largest version
_MINIMA = {"token_ids": 0, "positions": 0, "branches": 0, "versions": -1_000_000_001}


class ArraySpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one buffer."""

    name: str
    # Numpy's notation of a number type. The pattern excludes objects and structured types.
    dtype: Annotated[str, msgspec.Meta(pattern=r"^[<|][biuf][1248]$")]
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_AXES)]


class ArraysHeader(msgspec.Struct, frozen=True):
    """First frame of a message: its metadata, and name, dtype and shape of the arrays in the frames after it."""

    meta: msgspec.Raw
    arrays: tuple[ArraySpec, ...]


def to_frames(meta: Any, arrays: Mapping[str, NDArray[Any]] = {}) -> list[Frame]:
    """Encode `meta` and named arrays as frames for `send_multipart(copy=False)`. Contiguous arrays are not copied."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    specs = tuple(ArraySpec(name, array.dtype.str, array.shape) for name, array in contiguous.items())
    return [encode_header(meta, specs), *(array.reshape(-1).view(np.uint8).data for array in contiguous.values())]


def encode_header(meta: Any, specs: Sequence[ArraySpec]) -> bytes:
    return msgspec.msgpack.encode(ArraysHeader(msgspec.Raw(msgspec.msgpack.encode(meta)), tuple(specs)))


def from_frames(frames: Sequence[Any], kind: type[T]) -> tuple[T, Arrays]:
    """Decode a message into metadata of type `kind` and arrays, which are read-only views of the frames.

    Raise DamagedError if the header is damaged, or the frames do not match it.
    """
    if not frames:
        raise DamagedError("a message without a header")
    header = decode_msgpack(frames[0], ArraysHeader)
    if len(frames) != len(header.arrays) + 1:
        raise DamagedError(f"{len(frames) - 1} buffers, but the header names {len(header.arrays)}")
    arrays: Arrays = {}
    for spec, frame in zip(header.arrays, frames[1:], strict=True):
        if spec.name in arrays:
            raise DamagedError(f"two arrays {spec.name[:40]!r}")
        arrays[spec.name] = _array(spec, frame)
    return decode_msgpack(header.meta, kind), arrays


def _array(spec: ArraySpec, frame: Any) -> NDArray[Any]:
    raw, name = np.frombuffer(frame, np.uint8), spec.name[:40]
    try:
        dtype = np.dtype(spec.dtype)
        fits = len(raw) == math.prod(spec.shape) * dtype.itemsize
        array = raw.view(dtype).reshape(spec.shape) if fits else None
    except (TypeError, ValueError) as error:  # no dtype of numpy, or more elements than it can count
        raise DamagedError(f"{name!r}: {error}") from error
    if array is None:
        raise DamagedError(f"{len(raw)} bytes for {name!r}, {spec.dtype}{list(spec.shape)}")
    # Numpy takes any byte for a boolean, and code that relies on 0 and 1 would compute nonsense.
    if dtype.kind == "b" and raw.max(initial=0) > 1:
        raise DamagedError(f"{name!r} has booleans other than 0 and 1")
    return array


class IncomingArrays:
    """Buffers of a message whose bytes arrive in chunks.

    Raise DamagedError if the header is damaged, or announces more than `most` bytes.
    """

    def __init__(self, header: Any, empty: Callable[[int], NDArray[np.uint8]], most: int) -> None:
        # dtypes are "<f4" and the like
        specs = decode_msgpack(header, ArraysHeader).arrays
        sizes = [math.prod(spec.shape) * int(spec.dtype[2:]) for spec in specs]
        if sum(sizes) > most:
            raise DamagedError(f"{sum(sizes)} bytes are announced, of at most {most}")
        self._header = header
        self.size = sum(sizes)
        self.received = 0
        try:
            self.buffers = [empty(size) for size in sizes]
        except MemoryError as error:
            raise DamagedError(f"there is no memory for {self.size} bytes") from error
        self._unfilled = [buffer for buffer in self.buffers if len(buffer)]

    def take(self, chunks: Sequence[Any]) -> None:
        """Copy the next bytes of the arrays into the buffers.

        Raise DamagedError for more bytes than the message's header announced.
        """
        for chunk in chunks:
            rest = np.frombuffer(chunk, np.uint8)
            while len(rest):
                if not self._unfilled:
                    raise DamagedError(f"more bytes than the {self.size} that were announced")
                buffer = self._unfilled[0]
                count = min(len(buffer), len(rest))
                buffer[:count] = rest[:count]
                self.received += count
                rest = rest[count:]
                self._unfilled[:1] = [buffer[count:]] if count < len(buffer) else []

    def frames(self) -> list[Any]:
        return [self._header, *self.buffers]


def assembled(frames: Sequence[Any]) -> list[Any]:
    """Join the frames of a message, whose division is arbitrary, to its header and one buffer per array."""
    incoming = IncomingArrays(frames[0], lambda size: np.empty(size, np.uint8), sum(len(frame) for frame in frames[1:]))
    incoming.take(frames[1:])
    return incoming.frames()


@functools.cache
def _required(kind: type[Any], without: str) -> dict[str, bool]:
    """Return the names of a dataclass's arrays, and whether each is required."""
    names = _DTYPES.keys() - {without}
    return {spec.name: spec.default is MISSING for spec in fields(kind) if spec.name in names}


def mismatch(kind: Any, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], without: str = "") -> str:
    """Return the first difference between named arrays and the fields of a dataclass; empty if there is none.

    `kind` has one field per array. Fields without a default are required, and `without` names a field whose array is
    not expected. `shape` is that of each array; routed experts have two more axes.
    """
    required = _required(kind, without)
    if unknown := arrays.keys() - required.keys():
        return f"unknown arrays {sorted(name[:40] for name in unknown)[:4]}"
    if missing := {name for name, needed in required.items() if needed} - arrays.keys():
        return f"no {', '.join(sorted(missing))}"
    for name, array in arrays.items():
        axes = array.shape[len(shape) :]
        fits = array.dtype.str[1:] in _DTYPES[name] and array.shape[: len(shape)] == shape
        expected_axes = 2 if name == "routed_experts" else 0
        if not fits or len(axes) != expected_axes or not all(0 < axis <= MAX_AXIS for axis in axes):
            return f"{name} is {array.dtype}{list(array.shape)} instead of {_DTYPES[name][0]}{list(shape)}"
        if name in _MINIMA and array.min() < _MINIMA[name]:
            return f"{name} below {_MINIMA[name]}"
    return ""

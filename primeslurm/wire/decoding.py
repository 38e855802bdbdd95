"""Decoding of values from other processes: the result has the expected type, or a DamagedError is raised.

This module does not import numpy, because agents read records, and there are many agents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, msgspec.Meta(ge=0)]

_decoders: dict[Any, Any] = {}
_lock = threading.Lock()


class DamagedError(ValueError):
    """Data from another process violates its protocol. All decoders of the wire raise only this error."""


def decode_msgpack(data: Any, kind: type[T]) -> T:
    """Decode one msgpack value of type `kind`. Raise DamagedError."""
    return _decoded(msgspec.msgpack.Decoder, data, kind)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode one JSON value of type `kind`. Raise DamagedError."""
    return _decoded(msgspec.json.Decoder, data, kind)


def _decoded(make: Callable[[Any], Any], data: Any, kind: type[T]) -> T:
    try:
        value: T = _decoder(make, kind).decode(data)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    return value


def _decoder(make: Callable[[Any], Any], kind: Any) -> Any:
    decoder = _decoders.get((make, kind))
    if decoder is None:
        # Only one thread may make the decoder of a type: msgspec caches type information on the type itself, and a
        # second thread would read it half made and crash.
        with _lock:
            decoder = _decoders.get((make, kind)) or _decoders.setdefault((make, kind), make(kind))
    return decoder

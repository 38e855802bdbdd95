"""One value of another process: decoded to what its reader was promised, or refused with a DamagedError.

Without numpy: agents read records, and are many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, msgspec.Meta(ge=0)]

_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_json_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()


class DamagedError(ValueError):
    """What came in is not what its protocol says. The one exception of all decoders of the wire."""


def value(data: Any, kind: type[T]) -> T:
    """Decode one msgpack value.

    Raises:
        DamagedError: it is not one of this kind.
    """
    try:
        decoder: msgspec.msgpack.Decoder[T] = _made(_decoders, msgspec.msgpack.Decoder, kind)
        return decoder.decode(data)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error


def json_value(data: bytes, kind: type[T]) -> T:
    """Decode one JSON value.

    Raises:
        DamagedError: it is not one of this kind.
    """
    try:
        decoder: msgspec.json.Decoder[T] = _made(_json_decoders, msgspec.json.Decoder, kind)
        return decoder.decode(data)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error


def _made(known: dict[Any, Any], make: Callable[[Any], Any], kind: Any) -> Any:
    """The decoder of a type, made by one thread: what others use of it meanwhile would be half made, and crash."""
    found = known.get(kind)
    if found is None:
        with _making:
            found = known.get(kind) or known.setdefault(kind, make(kind))
    return found

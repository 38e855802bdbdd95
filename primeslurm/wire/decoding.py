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

_decoders: dict[Any, Any] = {}
"""By what makes them, and by type."""
_making = threading.Lock()


class DamagedError(ValueError):
    """What came in is not what its protocol says. The one exception of all decoders of the wire."""


def value(data: Any, kind: type[T]) -> T:
    """Decode one msgpack value.

    Raises:
        DamagedError: it is not one of this kind.
    """
    return _decoded(msgspec.msgpack.Decoder, data, kind)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode one JSON value.

    Raises:
        DamagedError: it is not one of this kind.
    """
    return _decoded(msgspec.json.Decoder, data, kind)


def _decoded(make: Callable[[Any], Any], data: Any, kind: type[T]) -> T:
    try:
        found: T = _decoder(make, kind).decode(data)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    return found


def _decoder(make: Callable[[Any], Any], kind: Any) -> Any:
    """The decoder of a type, made by one thread: what others use of it meanwhile would be half made, and crash."""
    found = _decoders.get((make, kind))
    if found is None:
        with _making:
            found = _decoders.get((make, kind)) or _decoders.setdefault((make, kind), make(kind))
    return found

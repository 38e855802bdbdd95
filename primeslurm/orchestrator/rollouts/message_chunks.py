"""Messages to the orchestrator in small pieces: whoever connects is let send no longer part than a piece.

ZMQ makes room for a part as it comes, also for that of a peer that has not shown the secret yet, and its one bound on
parts holds before as after. A result has arrays of a gigabyte. So what is longer than a piece is cut, and put together
by those who know whom it is from.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from primeslurm.wire.batches.rollouts import Frame
from primeslurm.wire.decoding import DamagedError, Size, value

PIECE = 60 << 10
"""Bytes; pyzmq copies what is shorter than 64 KiB, which costs less there than lending it."""
LARGEST_PART = 64 << 10
"""Bytes of a part on ZMQ (`MAXMSGSIZE`)."""
_MARK = b"\xc1"
"""Begins a message that was cut; no value of msgpack begins with it."""


def cut(parts: Sequence[Frame]) -> list[Frame]:
    """Cut a message so that no part is longer than a piece; one that has none is left as it is."""
    views = [memoryview(part).cast("B") for part in parts]
    if all(view.nbytes <= PIECE for view in views):
        return list(parts)
    head = _MARK + msgspec.msgpack.encode([view.nbytes for view in views])
    return [head, *(view[start : start + PIECE] for view in views for start in range(0, view.nbytes, PIECE))]


def is_cut(parts: Sequence[Frame]) -> bool:
    """Tell whether a message came in pieces."""
    return bool(parts) and bytes(parts[0][:1]) == _MARK


def joined(parts: list[Frame]) -> list[Frame]:
    """Put a message together again: a copy, in which others have their turn after each piece.

    Args:
        parts: what came; emptied on the way, so that not all of it is in memory twice.

    Returns:
        What was sent; a part that was not cut is still what came, and no copy.

    Raises:
        DamagedError: it is not as long as it says.
    """
    if not is_cut(parts):
        return parts
    lengths = value(parts[0][1:], list[Size])
    come = sum(len(part) for part in parts[1:])
    if sum(lengths) != come:  # so that room is made for no more than is there
        raise DamagedError(f"{come} bytes of {sum(lengths)}")
    rest = parts[:0:-1]
    parts.clear()
    return [_taken(rest, length) for length in lengths]


def _taken(rest: list[Frame], length: int) -> Frame:
    """The next bytes of what is left, whose next piece is last."""
    if length and len(rest[-1]) == length:
        return rest.pop()
    room = np.empty(length, np.uint8)
    done = 0
    while done < length:
        piece = np.frombuffer(rest.pop(), np.uint8)  # unlike a memoryview, it is copied without the interpreter's lock
        if done + len(piece) > length:
            raise DamagedError(f"a piece of {len(piece)} bytes where {length - done} are left")
        room[done : done + len(piece)] = piece
        done += len(piece)
    return room.data

"""What one rank trains of a batch, as a file on the file system that all nodes share.

A file is there as a whole or not at all, and has no bytes but those of its rank: the prefix (what it is, and length and
CRC-32 of the head), the head, and then what would be sent (see `rollouts`): a header, and the arrays' bytes.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from primeslurm.base import durable, files
from primeslurm.wire.batches.file_ranges import PIECE, Part, loaded
from primeslurm.wire.batches.rollouts import Batch, IncomingArrays
from primeslurm.wire.decoding import DamagedError, Size, value
from primeslurm.wire.stored.digests import XXH3, hasher

MAGIC = b"primeslurm batch"
_PREFIX = struct.Struct(f">{len(MAGIC)}sII")
LARGEST_HEADER = 1 << 30
"""Bytes of a header, which may have images in data URIs."""


class _Head(msgspec.Struct, frozen=True):
    """What is known before the rest is read."""

    header: Size
    """Bytes of the header after the head."""
    arrays: Size
    """Bytes of the arrays after the header."""
    digest: str
    """Of both."""


def write(path: Path, parts: Sequence[Part]) -> None:
    """Write a file, on disk when this returns.

    Args:
        path: of the file, in a directory that is there.
        parts: the header, and the bytes of the arrays, cut as it suits. They are not copied; those that are on disk
            are read piece by piece, for the digest and to be written.

    Raises:
        DamagedError: a part on disk cannot be read.
        OSError: it cannot be written; what was there before still is.
    """
    state = hasher()
    for frame in loaded(parts):
        state.update(frame)
    sizes = [len(part) for part in parts]
    head = msgspec.msgpack.encode(_Head(sizes[0], sum(sizes[1:]), XXH3 + state.hexdigest()))
    prefix = _PREFIX.pack(MAGIC, len(head), zlib.crc32(head))
    durable.write(path, lambda: chain([prefix, head], loaded(parts)))


def read(
    path: Path, empty: Callable[[int], NDArray[np.uint8]], most: int, on_piece: Callable[[], None] = lambda: None
) -> Batch:
    """Read a file, each byte once, straight to where it stays.

    Args:
        path: of the file.
        empty: makes room for so many bytes of an array.
        most: bytes that the arrays may have.
        on_piece: called before each piece that is read.

    Raises:
        DamagedError: it is not what was written.
        OSError: it cannot be read.
    """
    incoming = files.reading(path, lambda file: _incoming(file, empty, most, on_piece))
    return Batch.decode(incoming.frames())


def _incoming(
    file: Any, empty: Callable[[int], NDArray[np.uint8]], most: int, on_piece: Callable[[], None]
) -> IncomingArrays:
    head, _ = _head(file)
    if head.header > LARGEST_HEADER:
        raise DamagedError(f"a header of {head.header} bytes")
    state, header = hasher(), np.empty(head.header, np.uint8)
    for piece in _filled(file, header, on_piece):
        state.update(piece)
    incoming = IncomingArrays(header.tobytes(), empty, most)
    if incoming.size != head.arrays:
        raise DamagedError(f"{head.arrays} bytes of arrays, where the header announces {incoming.size}")
    for place in incoming.places:
        for piece in _filled(file, place, on_piece):
            state.update(piece)
    if XXH3 + state.hexdigest() != head.digest:
        raise DamagedError("its bytes are not what was written")
    return incoming


def is_there(path: Path, *, whole: bool) -> bool:
    """Tell whether there is a file that can be read.

    Args:
        path: of the file.
        whole: read all of it, not its head alone.
    """

    def read(file: Any) -> bool:
        head, left = _head(file)
        if not whole:
            return True
        state, room = hasher(), np.empty(min(PIECE, left), np.uint8)
        while left:
            for piece in _filled(file, room[: min(left, len(room))]):
                state.update(piece)
                left -= len(piece)
        return bool(XXH3 + state.hexdigest() == head.digest)

    try:
        return files.reading(path, read)
    except (OSError, DamagedError):
        return False


def _head(file: Any) -> tuple[_Head, int]:
    """The head of an open file, and how many bytes follow. The file is then behind it."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise DamagedError(f"{size} bytes that do not begin as a batch does")
    _, length, checksum = _PREFIX.unpack(prefix)
    encoded = file.read(length) if length <= size else b""
    if len(encoded) != length or zlib.crc32(encoded) != checksum:
        raise DamagedError("its head is damaged")
    head = value(encoded, _Head)
    left = size - _PREFIX.size - length
    if left != head.header + head.arrays:
        raise DamagedError(f"{left} bytes after its head, of {head.header + head.arrays}")
    return head, left


def _filled(file: Any, place: NDArray[np.uint8], on_piece: Callable[[], None] = lambda: None) -> Iterator[memoryview]:
    """Fill a place from a file, piece by piece: each is in the processor's cache when it is given out."""
    start = 0
    while start < len(place):
        on_piece()
        count = file.readinto(place[start : start + PIECE])
        if not count:
            raise DamagedError("it ends before its end")
        yield place[start : start + count].data
        start += count

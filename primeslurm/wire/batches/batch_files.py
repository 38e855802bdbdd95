"""One rank's batch as a file on the shared file system.

A file is complete or does not exist, and holds only the bytes of its rank: a prefix (magic, length and CRC-32 of the
head), the head, and then the frames that would be sent: the message's header and the bytes of the arrays.
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
from primeslurm.wire.batches.batch import Batch
from primeslurm.wire.batches.file_ranges import READ_BYTES, FrameSource, loaded
from primeslurm.wire.batches.frames import IncomingArrays
from primeslurm.wire.decoding import DamagedError, Size, decode_msgpack
from primeslurm.wire.stored.checksums import XXH3, hasher

MAGIC = b"primeslurm batch"
_PREFIX = struct.Struct(f">{len(MAGIC)}sII")
LARGEST_HEADER = 1 << 30  # maximum size of a message's header [bytes], which may contain images as data URIs


class _Head(msgspec.Struct, frozen=True):
    """Sizes and digest of a batch file, at its start, so that a reader can allocate memory and verify the rest."""

    header: Size  # size of the message's header [bytes]
    arrays: Size  # size of all arrays [bytes]
    digest: str  # digest of header and arrays


def write(path: Path, parts: Sequence[FrameSource]) -> None:
    """Write the header of a message and the bytes of its arrays to a file, and flush it to disk.

    Parts on disk are read twice, for the digest and to be written. Raises DamagedError if one cannot be read, and
    OSError if the file cannot be written; a previous file is unchanged then.
    """
    state = hasher()
    for frame in loaded(parts):
        state.update(frame)
    sizes = [len(part) for part in parts]
    head = msgspec.msgpack.encode(_Head(sizes[0], sum(sizes[1:]), XXH3 + state.hexdigest()))
    prefix = _PREFIX.pack(MAGIC, len(head), zlib.crc32(head))
    durable.write(path, lambda: chain([prefix, head], loaded(parts)))


def read(
    path: Path, empty: Callable[[int], NDArray[np.uint8]], most: int, on_block: Callable[[], None] = lambda: None
) -> Batch:
    """Read a file, each byte once and directly into its array. Raises DamagedError for damaged content, or OSError."""
    incoming = files.reading(path, lambda file: _incoming(file, empty, most, on_block))
    return Batch.decode(incoming.frames())


def _incoming(
    file: Any, empty: Callable[[int], NDArray[np.uint8]], most: int, on_block: Callable[[], None]
) -> IncomingArrays:
    head, _ = _head(file)
    if head.header > LARGEST_HEADER:
        raise DamagedError(f"a header of {head.header} bytes")
    state, header = hasher(), np.empty(head.header, np.uint8)
    for block in _filled(file, header, on_block):
        state.update(block)
    incoming = IncomingArrays(header.tobytes(), empty, most)
    if incoming.size != head.arrays:
        raise DamagedError(f"{head.arrays} bytes of arrays, but the header announces {incoming.size}")
    for buffer in incoming.buffers:
        for block in _filled(file, buffer, on_block):
            state.update(block)
    if XXH3 + state.hexdigest() != head.digest:
        raise DamagedError("its digest does not match its content")
    return incoming


def is_there(path: Path, *, whole: bool) -> bool:
    """Return whether a readable file exists. With `whole`, check all of it, not only its head."""

    def read(file: Any) -> bool:
        head, left = _head(file)
        if not whole:
            return True
        state, buffer = hasher(), np.empty(min(READ_BYTES, left), np.uint8)
        while left:
            for block in _filled(file, buffer[: min(left, len(buffer))]):
                state.update(block)
                left -= len(block)
        return bool(XXH3 + state.hexdigest() == head.digest)

    try:
        return files.reading(path, read)
    except (OSError, DamagedError):
        return False


def _head(file: Any) -> tuple[_Head, int]:
    """Read the head of an open batch file. Return the head, and the number of bytes that follow it."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise DamagedError(f"{size} bytes that do not begin like a batch file")
    _, length, checksum = _PREFIX.unpack(prefix)
    encoded = file.read(length) if length <= size else b""
    if len(encoded) != length or zlib.crc32(encoded) != checksum:
        raise DamagedError("its head is damaged")
    head = decode_msgpack(encoded, _Head)
    left = size - _PREFIX.size - length
    if left != head.header + head.arrays:
        raise DamagedError(f"{left} bytes follow the head, which announces {head.header + head.arrays}")
    return head, left


def _filled(file: Any, buffer: NDArray[np.uint8], on_block: Callable[[], None] = lambda: None) -> Iterator[memoryview]:
    """Fill a buffer from a file. Yield each block right after it is read, while it is in the CPU's cache."""
    start = 0
    while start < len(buffer):
        on_block()
        count = file.readinto(buffer[start : start + READ_BYTES])
        if not count:
            raise DamagedError("the file is too short")
        yield buffer[start : start + count].data
        start += count

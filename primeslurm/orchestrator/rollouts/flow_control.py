"""Flow control of results, which have arrays of up to a gigabyte, so that no peer fills the orchestrator's memory.

ZMQ buffers everything that arrives, also frames of a peer that has not authenticated yet, and it has a single size
limit for frames before and after the handshake. Therefore workers split longer frames into chunks, and the orchestrator
joins the chunks of authenticated workers (`to_chunks`, `join_frames`). Several small frames become one chunk, because
each frame costs ZMQ an encryption and both ends 5 to 10 us of Python.

The rollouts of a group end together, and all their results would wait in memory in small chunks, which the allocator
keeps after they are joined and freed: for 16 rollouts of 80 MB, 1.3 GB besides the joined results. `ReceiveWindow`
limits the bytes that workers send at once, over all connections, like TCP's receive window.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.decoding import DamagedError, Size, decode_msgpack

# Size of a chunk. pyzmq copies frames below 64 KiB, which is cheaper there than sending them without a copy.
CHUNK_BYTES = 60 << 10
MAX_FRAME_BYTES = 64 << 10  # maximum size of a frame on ZMQ (`MAXMSGSIZE`)
_SPLIT_MARK = b"\xc1"  # First byte of a split message. No msgpack value begins with it.
WINDOW = 256 << 20  # bytes in flight: three of the longest rollouts, so the next results arrive while one is joined


def to_chunks(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames of a message as chunks, or unchanged if there is only one, and it is small."""
    # The first chunk begins with a mark, the size of the list of lengths in four bytes, and the lengths of all frames.
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = [view.nbytes for view in views]
    if len(views) == 1 and sizes[0] <= CHUNK_BYTES:
        return list(frames)
    lengths = msgspec.msgpack.encode(sizes)
    head = _SPLIT_MARK + len(lengths).to_bytes(4, "big") + lengths
    if len(head) + sum(sizes) <= CHUNK_BYTES:
        return [b"".join((head, *views))]
    return [head, *(view[at : at + CHUNK_BYTES] for view in views for at in range(0, view.nbytes, CHUNK_BYTES))]


def join_frames(frames: list[Frame]) -> list[Frame]:
    """Join the chunks of a message, and empty it. Raise DamagedError if chunks and announced frames differ."""
    # The interpreter's lock is released during the copy. Chunks are freed as they are copied.
    if not frames or bytes(frames[0][:1]) != _SPLIT_MARK:
        return frames
    first = memoryview(frames[0])
    end = 5 + int.from_bytes(first[1:5], "big")
    lengths = decode_msgpack(first[5:end], list[Size])
    chunks: list[Frame] = [first[end:], *frames[1:]]
    received = sum(map(len, chunks))
    if sum(lengths) != received:  # checked before memory is allocated by these lengths
        raise DamagedError(f"{received} bytes of {sum(lengths)}")
    frames.clear()
    chunks.reverse()  # so that the next one is popped from the end
    return [_take(chunks, length) for length in lengths]


def _take(chunks: list[Frame], length: int) -> Frame:
    """Take the next bytes: a view if one chunk has them all, else a copy."""
    while chunks and not len(chunks[-1]):
        chunks.pop()
    if not length or length <= len(chunks[-1]):
        return _take_from_next(chunks, length)
    frame = np.empty(length, np.uint8)
    done = 0
    while done < length:
        part = _take_from_next(chunks, length - done)
        # numpy copies without the interpreter's lock, memoryview does not
        frame[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    return frame.data


def _take_from_next(chunks: list[Frame], most: int) -> Frame:
    """Take bytes of the next chunk. The rest of the chunk stays."""
    chunk = chunks.pop() if chunks else b""
    if len(chunk) > most:
        chunks.append(chunk[most:])
    return chunk[:most]


class ReceiveWindow:
    """Selects the results to request: the oldest that fit into the window besides those in flight."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._offered: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}

    def offer(self, job: str, size: int) -> None:
        """Add a result that a worker has, or one to be requested again."""
        self._in_flight.pop(job, None)
        self._offered.setdefault(job, size)

    def forget(self, job: str) -> None:
        """Remove a result that has arrived or never will."""
        self._offered.pop(job, None)
        self._in_flight.pop(job, None)

    def admit(self) -> list[str]:
        """Return the jobs whose results to request now. A result larger than the window is requested alone."""
        admitted: list[str] = []
        free = self._size - sum(self._in_flight.values())
        for job, size in self._offered.items():
            if size > free and (self._in_flight or admitted):
                break
            admitted.append(job)
            free -= size
        self._in_flight |= {job: self._offered.pop(job) for job in admitted}
        return admitted

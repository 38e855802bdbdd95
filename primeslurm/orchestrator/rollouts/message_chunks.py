"""Messages to the orchestrator in small frames, so that no peer can make it buffer more than one of them.

ZMQ buffers a frame while it arrives, also a frame of a peer that has not authenticated yet, and it has a single size
limit for frames before and after the handshake. But a result has arrays of up to a gigabyte. Therefore workers split
longer frames into chunks, and the orchestrator joins the chunks of authenticated workers.
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


def split_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Split the frames of a message into chunks, or return it unchanged if all frames are small."""
    views = [memoryview(frame).cast("B") for frame in frames]
    if all(view.nbytes <= CHUNK_BYTES for view in views):
        return list(frames)
    head = _SPLIT_MARK + msgspec.msgpack.encode([view.nbytes for view in views])
    chunks = (view[start : start + CHUNK_BYTES] for view in views for start in range(0, view.nbytes, CHUNK_BYTES))
    return [head, *chunks]


def is_split(frames: Sequence[Frame]) -> bool:
    return bool(frames) and bytes(frames[0][:1]) == _SPLIT_MARK


def join_frames(frames: list[Frame]) -> list[Frame]:
    """Join the chunks of a message. Releases the interpreter's lock while it copies.

    Args:
        frames: The message as received. The list is emptied on the way, so that chunks are freed as they are copied.

    Returns:
        The original frames. Frames of one chunk are not copied.

    Raises:
        DamagedError: Chunks do not add up to the announced frames.
    """
    if not is_split(frames):
        return frames
    lengths = decode_msgpack(frames[0][1:], list[Size])
    received = sum(len(frame) for frame in frames[1:])
    if sum(lengths) != received:  # checked before memory is allocated by these lengths
        raise DamagedError(f"{received} bytes of {sum(lengths)}")
    chunks = frames[:0:-1]  # in reverse, so that the next one is popped from the end
    frames.clear()
    return [_take(chunks, length) for length in lengths]


def _take(chunks: list[Frame], length: int) -> Frame:
    if length and len(chunks[-1]) == length:
        return chunks.pop()
    frame = np.empty(length, np.uint8)
    done = 0
    while done < length:
        chunk = np.frombuffer(
            chunks.pop(), np.uint8
        )  # numpy copies without the interpreter's lock, memoryview does not
        if done + len(chunk) > length:
            raise DamagedError(f"a chunk of {len(chunk)} bytes where {length - done} are left")
        frame[done : done + len(chunk)] = chunk
        done += len(chunk)
    return frame.data

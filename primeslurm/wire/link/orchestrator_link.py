"""The orchestrator's end of the link: answers the trainer's ZMQ requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq
import zmq.asyncio

from primeslurm.wire.batches.file_ranges import FileRange, FrameSource, loaded
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.decoding import decode_msgpack
from primeslurm.wire.link.messages import CHUNK_BYTES, LARGEST_REQUEST, Answer, GetBatch, Request
from primeslurm.wire.transport import curve

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Sequence[FrameSource] | Answer]]
READ_THREADS = 4  # Threads that read chunks from disk. A single reader does not saturate a network file system.


class OrchestratorLink:
    """Serves the requests of all trainer ranks concurrently.

    Args:
        handler: Returns an Answer, or the frames of a batch; an exception becomes an error answer. If a batch takes
            long, it should return Answer("wait") well before the client's `retry_s`. After the header, frames are the
            bytes of the arrays in any division. They are sent without a copy, so they must not change. Those on disk
            are read by a thread when their chunk is requested.
    """

    def __init__(self, bind: str, handler: Handler) -> None:
        self._handler = handler
        self._socket = zmq.asyncio.Context.instance(curve.IO_THREADS).socket(zmq.ROUTER)
        curve.secure_server(self._socket)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_REQUEST)  # ZMQ disconnects a peer that sends more
        self._socket.bind(bind)
        self._tasks: set[asyncio.Task[None]] = set()
        # Connection that sent a request last, by request, while it is being answered.
        self._latest_sender: dict[bytes, bytes] = {}
        self._readers = ThreadPoolExecutor(READ_THREADS, "batch-reading")
        self.sent_bytes = 0  # bytes of batches sent so far

    async def serve(self) -> None:
        try:
            while True:
                frames = await self._socket.recv_multipart()
                if len(frames) != 3:  # identity, empty, request
                    log.warning("ignored a message of %d frames, because requests have 3", len(frames))
                    continue
                identity, _, raw = frames
                # A rank that repeats its request has reconnected and no longer listens on the old connection. The
                # answer in progress goes to the new one, and nothing is done or sent twice.
                in_progress = raw in self._latest_sender
                self._latest_sender[raw] = identity
                if in_progress:
                    continue
                task = asyncio.create_task(self._answer(raw))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in self._tasks:
                task.cancel()
            self._readers.shutdown(wait=False, cancel_futures=True)
            self._socket.close(linger=1000)

    async def _answer(self, raw: bytes) -> None:
        frames: list[Frame] = []
        try:
            request: Request = decode_msgpack(raw, Request)  # type: ignore[arg-type]  # a union is no type
            result = await self._handler(request)
            if isinstance(result, Answer):
                answer = result
            else:
                sources = chunk(result, request.offset if isinstance(request, GetBatch) else 0)
                answer, frames = Answer("batch"), await self._loaded(sources)
        except Exception as error:
            # File names in the text may have surrogates, which msgpack refuses.
            text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
            answer = Answer("error", text)
        self.sent_bytes += sum(len(frame) for frame in frames)
        identity = self._latest_sender.pop(raw)
        await self._socket.send_multipart([identity, b"", msgspec.msgpack.encode(answer), *frames], copy=False)

    async def _loaded(self, sources: list[FrameSource]) -> list[Frame]:
        in_memory = [source for source in sources if not isinstance(source, FileRange)]
        if len(in_memory) == len(sources):
            return in_memory
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: list(loaded(sources)))


def chunk(frames: Sequence[FrameSource], offset: int) -> list[FrameSource]:
    """Return at most CHUNK_BYTES of the arrays from `offset` on, without copying. At 0 the header precedes them."""
    taken: list[FrameSource] = [] if offset else [frames[0]]
    start, end = offset, offset + CHUNK_BYTES
    for frame in frames[1:]:
        if end <= 0:
            break
        if start < len(frame):
            first = max(start, 0)
            taken.append(frame.cut(first, end) if isinstance(frame, FileRange) else memoryview(frame)[first:end])
        start, end = start - len(frame), end - len(frame)
    return taken

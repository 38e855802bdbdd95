"""The link between trainer and orchestrator: ZMQ requests, each idempotent, with time-outs on both sides.

The trainer asks, the orchestrator answers. Every request names its step or version, so one that is repeated after a
lost answer changes nothing. A dead peer shows as silence: the client closes its socket, connects anew and asks again
until its own deadline.

requests (trainer -> orchestrator)              answers
  GetBatch(step, shard, ...)                    a Batch's bytes from an offset on | file: they are there | wait |
                                                stop | transfer: engines want the policy first
  NewPolicy(version, path)                      ok       a new policy is complete on the file system, or can be sent
  OfferTransfer(version, store, senders, done)  session  of engines that wait for it | wait | ok: none does
  SessionState(session, rank)                   ok | lost: an engine of it is gone
  StepDone(step, metrics)                       ok       metrics of the optimizer step
  Save(step, directory)                         ok       the orchestrator has written its part of the checkpoint
  Committed(step)                               ok       COMMITTED is on disk; says which earlier ones must stay

A batch may have tens of gigabytes. Its first answer has the header and the first CHUNK bytes of the arrays; the client
makes room for all of them and asks for the rest, chunk by chunk. So no time-out depends on the size of a batch, what is
on its way to all ranks at once is bounded, and what is lost with a connection is one chunk. A chunk that takes longer
than a dead peer is waited for (many ranks, or a slow network) is given twice the time whenever it is asked for again.
A request that comes again while it is being answered is answered once: to who asked last.
A batch that is a file (see `batch_files`) is not sent: who asks for it reads it. One that cannot be read is asked for
again: then it is looked at, and if need be written anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from primeslurm.wire import decoding
from primeslurm.wire.batches import batch_files
from primeslurm.wire.batches.file_ranges import FileRange, Part, loaded
from primeslurm.wire.batches.rollouts import Batch, Frame, IncomingArrays, RankShard
from primeslurm.wire.decoding import Size
from primeslurm.wire.transport import secret
from primeslurm.wire.weight_transfer.messages import NewPolicy, OfferTransfer, SessionState, TransferSession

log = logging.getLogger(__name__)


class GetBatch(msgspec.Struct, frozen=True, tag=True):
    """A rank wants its shard of the batch of `step` (first step: 1)."""

    step: int
    shard: RankShard
    ahead: bool = False
    """The step before is still being trained: the batch is formed only if nothing is lost by that."""
    offset: Size = 0
    """Bytes of its arrays that have come already."""
    unreadable: bool = False
    """The file that was named could not be read."""


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """Step `step` was trained."""

    step: int
    metrics: dict[str, float]


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write the orchestrator's part of the checkpoint of `step` into `directory`."""

    step: int
    directory: str


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint of `step` is committed."""

    step: int


LARGEST_REQUEST = 256 << 10
"""Bytes of a part of a request. Requests are words; the longest holds the metrics of a step, some ten kilobytes. Who
has not shown the secret yet makes the orchestrator hold so much, too."""
CHUNK = 2 << 20
"""Bytes of arrays in an answer. All ranks ask for the first at once, so that it is on its way to each of them."""
LARGEST_ANSWER = 1 << 30
"""Bytes of a part of an answer: a chunk, or the header of a batch, which may have images in data URIs."""
LARGEST_BATCH = 256 << 30
"""Bytes of what a rank trains in one step. Router replay makes some tens of gigabytes of it."""
MOST_PATIENT_S = 160.0
"""Longest wait for a chunk."""
REREAD_S = 1.0
"""Wait before a file is asked for again that could not be read; twice as long each time, up to MOST_REREAD_S."""
MOST_REREAD_S = 16.0
STATE_S = 2.0
"""Longest wait for the state of a session, which is asked for while something else is waited for."""

Request = GetBatch | NewPolicy | OfferTransfer | SessionState | StepDone | Save | Committed


class Answer(msgspec.Struct, frozen=True):
    """What the orchestrator says to a request."""

    kind: str
    """batch (frames follow), file (it is at `path`), ok, wait (ask again), stop (no more batches), error (text says
    why), transfer (engines want the policy before the next batch), session (come to it), lost (an engine of it is gone;
    text says which)."""
    text: str = ""
    session: TransferSession | None = None
    version: int | None = None
    """To NewPolicy: the newest policy that was announced in this attempt."""
    keep: list[int] = []
    """To Committed: steps whose checkpoints are kept however old they are."""
    path: str = ""
    """Of the file that holds the batch."""


class LinkError(Exception):
    """The peer did not answer before the deadline, or refused."""


class TransferWanted(Exception):
    """There is no batch yet, and engines wait to be sent the current policy."""


class TrainerLink:
    """The trainer's end. Not thread-safe; one per process.

    Args:
        address: ZMQ address of the orchestrator, for example tcp://host:port.
        timeout_s: a request that nobody answers for this long raises LinkError.
        retry_s: silence after which the socket is replaced and the request sent again.
        on_wait: called before each time that an answer is waited for, `retry_s` at most.
        empty: makes room for so many bytes of a batch. Default: in pageable memory.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 600.0,
        retry_s: float = 10.0,
        on_wait: Callable[[], None] = lambda: None,
        empty: Callable[[int], NDArray[np.uint8]] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._on_wait = on_wait
        self._empty = empty
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket: zmq.Socket[bytes] | None = None
        self.receiving = False
        """Whether a batch is coming: it is formed, and its first bytes are here."""

    def beside(self) -> TrainerLink:
        """Make another link to the same orchestrator, for another thread, whose waits are nobody's business."""
        return TrainerLink(self._address, self._timeout_s, self._retry_s, empty=self._empty)

    def get_batch(
        self,
        step: int,
        shard: RankShard,
        timeout_s: float,
        interrupted: Callable[[], bool] = lambda: False,
        *,
        ahead: bool = False,
    ) -> Batch | None:
        """Ask for a rank's shard of the batch of `step`.

        Args:
            step: that it is trained in.
            shard: of this rank.
            timeout_s: a batch may take so long to be formed.
            interrupted: whether to give up.
            ahead: the step before is still being trained.

        Returns:
            None if the orchestrator has no more batches, or if `interrupted()` became true.

        Raises:
            LinkError: nothing came for `timeout_s`, or something else than a batch.
            TransferWanted: engines have to be sent the policy; then ask again.
        """
        deadline = time.monotonic() + timeout_s
        request, pause_s, unreadable = GetBatch(step, shard, ahead), REREAD_S, ""
        while not interrupted():
            answer, parts = self._ask(request)
            self.receiving = answer.kind in ("batch", "file")
            if interrupted():  # looked at after that: who interrupts and then sees that nothing is coming, gets nothing
                break
            if answer.kind == "file":
                try:
                    return self._read(request, Path(answer.path))
                except (OSError, decoding.DamagedError) as error:
                    unreadable = f"; {answer.path} cannot be read: {error}"
                    log.warning("the batch of step %d%s", step, unreadable)
                request = msgspec.structs.replace(request, unreadable=True)
                pause_s = self._sleep(pause_s)
            else:
                request = msgspec.structs.replace(request, unreadable=False)
            if answer.kind == "batch":
                try:
                    return self._whole(request, answer, parts)
                except decoding.DamagedError as error:
                    raise LinkError(f"the batch of step {step} is damaged: {error}") from error
            if answer.kind == "stop":
                return None
            if answer.kind == "transfer":
                raise TransferWanted
            if time.monotonic() > deadline:
                raise LinkError(f"no batch for step {step} within {timeout_s:.0f} s{unreadable}")
        self.receiving = False
        return None

    def announce(self, version: int, path: str) -> int:
        """Announce a policy: complete under `path`, or (if empty) to be sent.

        Returns:
            The newest one that was announced in this attempt: newer than `version` if the trainer was started again
            from a checkpoint, and repeats steps.
        """
        answer, _ = self._ask(NewPolicy(version, path))
        return version if answer.version is None else answer.version

    def offer_transfer(
        self, version: int, store: str, senders: int, done: str, deadline: float
    ) -> TransferSession | None:
        """Offer a policy until engines come for it: the next session with them; None if no engine waits.

        Args:
            version: of the policy that is offered.
            store: host:port where senders and receivers meet.
            senders: number of trainer ranks.
            done: the session that was dealt with last.
            deadline: time.monotonic() after which None is returned in any case.
        """
        while True:
            answer, _ = self._ask(OfferTransfer(version, store, senders, done))
            if answer.kind != "wait" or time.monotonic() > deadline:
                return answer.session

    def lost_from(self, session: str, rank: int) -> str:
        """Ask, as a rank, whether a session has lost an engine: which, and why; "" if not, or without an answer."""
        try:
            answer, _ = self._ask(SessionState(session, rank), STATE_S)
        except LinkError:
            return ""
        return answer.text if answer.kind == "lost" else ""

    def step_done(self, step: int, metrics: dict[str, float]) -> None:
        """Report a trained step."""
        self._ask(StepDone(step, metrics))

    def save(self, step: int, directory: str) -> None:
        """Have the orchestrator write its part of a checkpoint."""
        self._ask(Save(step, directory))

    def committed(self, step: int) -> list[int]:
        """Announce a committed checkpoint; returns the steps whose checkpoints are kept however old they are."""
        return self._ask(Committed(step))[0].keep

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _read(self, request: GetBatch, path: Path) -> Batch:
        """The batch in a file."""
        try:
            batch = batch_files.read(path, self._empty, LARGEST_BATCH, self._on_wait)
        finally:
            self.receiving = False
        if (batch.info.step, batch.info.shard) != (request.step, request.shard):
            raise decoding.DamagedError(f"it holds {batch.info}")
        return batch

    def _sleep(self, pause_s: float) -> float:
        """Wait; returns how long to wait the next time."""
        for _ in range(max(1, round(pause_s))):
            self._on_wait()
            time.sleep(pause_s / max(1, round(pause_s)))
        return min(2 * pause_s, MOST_REREAD_S)

    def _whole(self, request: GetBatch, answer: Answer, parts: list[Any]) -> Batch:
        """The batch of which the first part has come."""
        if not parts:
            raise decoding.DamagedError("a batch without a header")
        incoming = IncomingArrays(bytes(parts[0]), self._empty, LARGEST_BATCH)
        incoming.take(parts[1:])
        while incoming.received < incoming.size:
            before = incoming.received
            answer, parts = self._ask(msgspec.structs.replace(request, offset=before))
            incoming.take(parts)
            if incoming.received == before or answer.kind != "batch":
                raise decoding.DamagedError(f"{before} bytes of {incoming.size} have come, and then {answer.kind}")
        self.receiving = False
        return Batch.decode(incoming.frames())

    def _ask(self, request: Request, timeout_s: float | None = None) -> tuple[Answer, list[Any]]:
        timeout_s = timeout_s or self._timeout_s
        deadline, patience_s = time.monotonic() + timeout_s, min(self._retry_s, timeout_s)
        while time.monotonic() < deadline:
            if self._socket is None:
                self._socket = self._context.socket(zmq.REQ)
                secret.present(self._socket)
                self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_ANSWER)
                self._socket.connect(self._address)
            self._socket.send(msgspec.msgpack.encode(request))
            if self._is_answered(self._socket, patience_s):
                parts = self._socket.recv_multipart(copy=False)
                try:
                    answer = decoding.value(parts[0].buffer, Answer)
                except decoding.DamagedError as error:
                    raise LinkError(f"{self._address} answers {request} with what is no answer: {error}") from error
                if answer.kind == "error":
                    raise LinkError(answer.text)
                return answer, [part.buffer for part in parts[1:]]
            self.close()  # a REQ socket cannot send twice: connect anew and repeat the idempotent request
            if isinstance(request, GetBatch):  # or what is always too late would be asked for for ever
                patience_s = min(2 * patience_s, max(MOST_PATIENT_S, self._retry_s))
        raise LinkError(f"{self._address} did not answer {request} within {timeout_s:.0f} s")

    def _is_answered(self, socket: zmq.Socket[bytes], patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while (left := deadline - time.monotonic()) > 0:
            self._on_wait()
            if socket.poll(int(min(left, self._retry_s) * 1000) + 1):
                return True
        return False


Handler = Callable[[Request], Awaitable[Sequence[Part] | Answer]]
READERS = 4
"""Chunks that are read from disk at once: what a network file system does with one is far from all that it can."""


class OrchestratorLink:
    """The orchestrator's end: answers each request through `handler`, concurrently.

    `handler` returns the parts of a batch or an Answer; an exception becomes an error answer. A GetBatch that has to
    wait should be answered with Answer("wait") well before the client's retry_s. Parts after the first are the bytes
    of the arrays, cut wherever it suits; they are sent without a copy, and must not change any more. Of those that are
    on disk a chunk is read, in a thread, when it is asked for.

    A rank that asks the same again, on another connection, no longer listens on the first: the answer that is being
    made goes to the second, and nothing is done or sent twice.
    """

    def __init__(self, bind: str, handler: Handler) -> None:
        self._handler = handler
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        secret.demand(self._socket)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_REQUEST)  # whoever sends more is disconnected
        self._socket.bind(bind)
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: dict[bytes, bytes] = {}
        """Who asked last, by the request that is being answered."""
        self._readers = ThreadPoolExecutor(READERS, "batch-reading")
        self.sent_bytes = 0
        """Of batches."""

    async def serve(self) -> None:
        """Answer until cancelled."""
        try:
            while True:
                parts = await self._socket.recv_multipart()
                if len(parts) != 3:  # identity, empty, request
                    log.warning("a message of %d parts is no request, and is ignored", len(parts))
                    continue
                identity, _, raw = parts
                answering = raw in self._asking
                self._asking[raw] = identity
                if answering:
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
        rest: list[Frame] = []
        try:
            request: Request = decoding.value(raw, Request)  # type: ignore[arg-type]  # a union is no type
            result = await self._handler(request)
            if isinstance(result, Answer):
                answer = result
            else:
                parts = chunk(result, request.offset if isinstance(request, GetBatch) else 0)
                answer, rest = Answer("batch"), await self._loaded(parts)
        except Exception as error:
            # Names of files in it need be no text, and msgpack takes nothing else.
            words = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
            answer = Answer("error", words)
        self.sent_bytes += sum(len(frame) for frame in rest)
        identity = self._asking.pop(raw)
        await self._socket.send_multipart([identity, b"", msgspec.msgpack.encode(answer), *rest], copy=False)

    async def _loaded(self, parts: list[Part]) -> list[Frame]:
        here = [part for part in parts if not isinstance(part, FileRange)]
        if len(here) == len(parts):
            return here
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: list(loaded(parts)))


def chunk(frames: Sequence[Part], offset: int) -> list[Part]:
    """Take what an answer has of a batch: at most CHUNK bytes of its arrays, and at first its header. No copies.

    Args:
        frames: the header, and the bytes of the arrays.
        offset: bytes of the arrays before them.
    """
    taken: list[Part] = [] if offset else [frames[0]]
    start, end = offset, offset + CHUNK
    for frame in frames[1:]:
        if end <= 0:
            break
        if start < len(frame):
            first = max(start, 0)
            taken.append(frame.cut(first, end) if isinstance(frame, FileRange) else memoryview(frame)[first:end])
        start, end = start - len(frame), end - len(frame)
    return taken

"""The trainer's end of the link: sends ZMQ requests to the orchestrator, and repeats them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from primeslurm.wire.batches import batch_files
from primeslurm.wire.batches.batch import Batch, RankShard
from primeslurm.wire.batches.frames import IncomingArrays
from primeslurm.wire.decoding import DamagedError, decode_msgpack
from primeslurm.wire.link.messages import (
    LARGEST_ANSWER,
    LARGEST_BATCH,
    Answer,
    Committed,
    GetBatch,
    Request,
    Save,
    StepDone,
)
from primeslurm.wire.transport import curve
from primeslurm.wire.weight_transfer.messages import NewPolicy, OfferTransfer, SessionState, TransferSession

log = logging.getLogger(__name__)

MAX_CHUNK_TIMEOUT_S = 160.0  # longest wait for one chunk
REREAD_S = 1.0  # First pause before an unreadable file is requested again. Each further pause is twice as long.
MAX_REREAD_S = 16.0
STATE_TIMEOUT_S = 2.0  # longest wait for the state of a session, because the caller waits for something else meanwhile


class LinkError(Exception):
    """The orchestrator did not answer before the deadline, or refused the request."""


class TransferWanted(Exception):
    """There is no batch yet, because engines wait for the current policy."""


class TrainerLink:
    """Sends requests to the orchestrator. Not thread-safe.

    Args:
        timeout_s: A request without an answer for this long raises LinkError.
        retry_s: Time without an answer after which the socket is replaced and the request repeated.
        on_wait: Called repeatedly while an answer is awaited, at least every `retry_s`.
        empty: Allocates an array of this many bytes for a batch. Default: in pageable memory.
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
        self.receiving = False  # whether a batch is being received: it is formed, and its first bytes have arrived

    def beside(self) -> TrainerLink:
        """Return a new link to the same orchestrator, for another thread. It does not call `on_wait` for heartbeats."""
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
        """Get the shard of a rank of the batch of `step`; None at the end of the run, or if `interrupted()` is true.

        Raises LinkError if no batch was formed in time or the answer is damaged, and TransferWanted if engines must
        get the policy first.
        """
        deadline = time.monotonic() + timeout_s
        request, pause_s, unreadable = GetBatch(step, shard, ahead), REREAD_S, ""
        while not interrupted():
            answer, frames = self._ask(request)
            self.receiving = answer.kind in ("batch", "file")
            # Checked after `receiving` is set: a thread that interrupts and then reads receiving = False must be sure
            # that no batch will come.
            if interrupted():
                break
            if answer.kind == "file":
                try:
                    return self._read(request, Path(answer.path))
                except (OSError, DamagedError) as error:
                    unreadable = f"; {answer.path} cannot be read: {error}"
                    log.warning("the batch of step %d%s", step, unreadable)
                request = msgspec.structs.replace(request, unreadable=True)
                pause_s = self._sleep(pause_s)
            else:
                request = msgspec.structs.replace(request, unreadable=False)
            if answer.kind == "batch":
                try:
                    return self._receive(request, frames)
                except DamagedError as error:
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
        """Announce a policy that is complete under `path`, or (if empty) that the trainer can send.

        Returns the newest policy of this attempt. It is newer than `version` if the trainer repeats steps after a
        restart.
        """
        answer, _ = self._ask(NewPolicy(version, path))
        return version if answer.version is None else answer.version

    def offer_transfer(
        self, version: int, store: str, senders: int, done: str, deadline: float
    ) -> TransferSession | None:
        """Offer a policy until engines join a session, and return it; None if no engine needs the policy.

        `done` is the last session that the trainer has finished or given up. After `deadline` (time.monotonic()) the
        answer is None in any case.
        """
        while True:
            answer, _ = self._ask(OfferTransfer(version, store, senders, done))
            if answer.kind != "wait" or time.monotonic() > deadline:
                return answer.session

    def lost_from(self, session: str, rank: int) -> str:
        """Return which engine a session has lost and why. Return "" if none, or if there is no answer."""
        try:
            answer, _ = self._ask(SessionState(session, rank), STATE_TIMEOUT_S)
        except LinkError:
            return ""
        return answer.text if answer.kind == "lost" else ""

    def step_done(self, step: int, metrics: dict[str, float]) -> None:
        self._ask(StepDone(step, metrics))

    def save(self, step: int, directory: str) -> None:
        """Wait until the orchestrator has written its part of a checkpoint."""
        self._ask(Save(step, directory))

    def committed(self, step: int) -> list[int]:
        """Report a committed checkpoint. Return the steps whose checkpoints must be kept."""
        return self._ask(Committed(step))[0].keep

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _read(self, request: GetBatch, path: Path) -> Batch:
        try:
            batch = batch_files.read(path, self._empty, LARGEST_BATCH, self._on_wait)
        finally:
            self.receiving = False
        if (batch.info.step, batch.info.shard) != (request.step, request.shard):
            raise DamagedError(f"it holds {batch.info}")
        return batch

    def _sleep(self, pause_s: float) -> float:
        for _ in range(max(1, round(pause_s))):
            self._on_wait()
            time.sleep(pause_s / max(1, round(pause_s)))
        return min(2 * pause_s, MAX_REREAD_S)

    def _receive(self, request: GetBatch, frames: list[Any]) -> Batch:
        if not frames:
            raise DamagedError("a batch without a header")
        incoming = IncomingArrays(bytes(frames[0]), self._empty, LARGEST_BATCH)
        incoming.take(frames[1:])
        while incoming.received < incoming.size:
            before = incoming.received
            answer, frames = self._ask(msgspec.structs.replace(request, offset=before))
            incoming.take(frames)
            if incoming.received == before or answer.kind != "batch":
                raise DamagedError(f"after {before} of {incoming.size} bytes came the answer {answer.kind}")
        self.receiving = False
        return Batch.decode(incoming.frames())

    def _ask(self, request: Request, timeout_s: float | None = None) -> tuple[Answer, list[Any]]:
        timeout_s = timeout_s or self._timeout_s
        deadline, try_s = time.monotonic() + timeout_s, min(self._retry_s, timeout_s)
        while time.monotonic() < deadline:
            if self._socket is None:
                self._socket = self._context.socket(zmq.REQ)
                curve.secure_client(self._socket)
                self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_ANSWER)
                self._socket.connect(self._address)
            self._socket.send(msgspec.msgpack.encode(request))
            if self._is_answered(self._socket, try_s):
                frames = self._socket.recv_multipart(copy=False)
                try:
                    answer = decode_msgpack(frames[0].buffer, Answer)
                except DamagedError as error:
                    raise LinkError(f"{self._address} sent a damaged answer to {request}: {error}") from error
                if answer.kind == "error":
                    raise LinkError(answer.text)
                return answer, [frame.buffer for frame in frames[1:]]
            self.close()  # a REQ socket cannot send twice, so reconnect and repeat the request
            if isinstance(request, GetBatch):  # a chunk that always takes longer than the timeout would never arrive
                try_s = min(2 * try_s, max(MAX_CHUNK_TIMEOUT_S, self._retry_s))
        raise LinkError(f"{self._address} did not answer {request} within {timeout_s:.0f} s")

    def _is_answered(self, socket: zmq.Socket[bytes], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self._on_wait()
            if socket.poll(int(min(left, self._retry_s) * 1000) + 1):
                return True
        return False

"""The orchestrator's end of the environment workers: who is alive, who runs which job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from primeslurm.orchestrator.rollouts.job_protocol import (
    Cancel,
    Job,
    Result,
    Status,
    ToOrchestrator,
    ToWorker,
    decode_sequences,
)
from primeslurm.wire import secret
from primeslurm.wire.rollouts import Rollout

log = logging.getLogger(__name__)

SILENT_S = 30.0
"""A worker that reports nothing for this long is given up."""
UNSEEN_S = 5.0
"""A job that a worker's status does not list this long after it was sent is lost."""


@dataclass
class _Peer:
    identity: bytes
    environment: str
    worker: int
    incarnation: str
    heard: float
    sent: dict[str, float] = field(default_factory=dict)


class WorkerPool:
    """Sends jobs to the least loaded worker of their environment and collects results.

    Args:
        bind: ZMQ address for the workers.
        on_result: called with (job, sequences) or (job, error text).
        on_lost: called with the id of each job whose worker is gone.
    """

    def __init__(
        self,
        bind: str,
        on_result: Callable[[str, tuple[Rollout, ...] | str], None],
        on_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_result = on_result
        self._on_lost = on_lost
        self._clock = clock
        self._peers: dict[bytes, _Peer] = {}
        self._owners: dict[str, _Peer] = {}
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        secret.demand(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(bind)

    @property
    def environments(self) -> set[str]:
        """Labels of the environments that have a live worker."""
        return {peer.environment for peer in self._peers.values()}

    async def serve(self) -> None:
        """Receive until cancelled."""
        try:
            while True:
                identity, head, *frames = await self._socket.recv_multipart()
                try:
                    await self._receive(identity, head, frames)
                except (ValueError, msgspec.MsgspecError) as error:
                    log.warning("a damaged message from a worker is ignored: %s", error)
        finally:
            self._socket.close()

    async def send(self, job: Job) -> None:
        """Give a job to a worker of its environment, which must have one."""
        peer = min((p for p in self._peers.values() if p.environment == job.environment), key=lambda p: len(p.sent))
        peer.sent[job.id] = self._clock()
        self._owners[job.id] = peer
        await self._tell(peer, job)

    async def cancel(self, jobs: Iterable[str]) -> None:
        """Stop jobs; nothing is heard of them any more."""
        by_peer: dict[bytes, list[str]] = {}
        for job in jobs:
            if peer := self._forget(job):
                by_peer.setdefault(peer.identity, []).append(job)
        for identity, cancelled in by_peer.items():
            await self._tell(self._peers[identity], Cancel(cancelled))

    def expire(self) -> None:
        """Give up the workers that are silent."""
        now = self._clock()
        for peer in [p for p in self._peers.values() if now - p.heard > SILENT_S]:
            self._give_up(peer, "is silent")

    async def _receive(self, identity: bytes, head: bytes, frames: list[bytes]) -> None:
        message = msgspec.msgpack.decode(head, type=ToOrchestrator)
        if isinstance(message, Status):
            await self._reconcile(identity, message)
        elif self._forget(message.job):
            self._on_result(message.job, message.error or _sequences(message, frames))

    async def _reconcile(self, identity: bytes, status: Status) -> None:
        now = self._clock()
        for other in list(self._peers.values()):
            if (other.environment, other.worker) != (status.environment, status.worker):
                continue
            if other.incarnation != status.incarnation:
                self._give_up(other, "was restarted")
            elif other.identity != identity:  # its connection was lost, and ZMQ made another one
                del self._peers[other.identity]
                other.identity = identity
                self._peers[identity] = other
        peer = self._peers.get(identity)
        if peer is None:
            peer = _Peer(identity, status.environment, status.worker, status.incarnation, now)
            self._peers[identity] = peer
            log.info("worker %s %d is up", status.environment, status.worker)
        peer.heard = now
        running = set(status.jobs)
        for job in [j for j, since in peer.sent.items() if j not in running and now - since > UNSEEN_S]:
            self._forget(job)
            self._on_lost(job)
        unknown = sorted(running - peer.sent.keys())
        if unknown:
            await self._tell(peer, Cancel(unknown))

    def _give_up(self, peer: _Peer, why: str) -> None:
        log.warning("worker %s %d %s; %d jobs are lost", peer.environment, peer.worker, why, len(peer.sent))
        del self._peers[peer.identity]
        for job in list(peer.sent):
            self._forget(job)
            self._on_lost(job)

    def _forget(self, job: str) -> _Peer | None:
        peer = self._owners.pop(job, None)
        if peer is not None:
            peer.sent.pop(job, None)
        return peer

    async def _tell(self, peer: _Peer, message: ToWorker) -> None:
        await self._socket.send_multipart([peer.identity, msgspec.msgpack.encode(message)])


def _sequences(result: Result, frames: list[bytes]) -> tuple[Rollout, ...] | str:
    """The sequences, or what is wrong with them: a damaged result is a failed rollout."""
    try:
        return decode_sequences(result, frames)
    except (ValueError, msgspec.MsgspecError) as error:
        return f"damaged result: {error}"

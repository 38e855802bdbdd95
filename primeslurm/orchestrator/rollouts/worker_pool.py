"""The orchestrator's end of the job protocol: which environment workers are alive, and which job each of them runs."""

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
class _Worker:
    """What the pool knows of an environment worker that is alive."""

    identity: bytes
    """Of its connection, as ZMQ names it."""
    environment: str
    number: int
    incarnation: str
    heard: float
    """When its last status came."""
    tasks: int | None = None
    """How many its environment has, where it says so."""
    sent: dict[str, float] = field(default_factory=dict)
    """Jobs that it was sent and has not ended, by id, with the time of sending."""


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
        self._live: dict[bytes, _Worker] = {}
        self._owners: dict[str, _Worker] = {}
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        secret.demand(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(bind)

    @property
    def environments(self) -> set[str]:
        """Return the labels of the environments that have a live worker."""
        return {worker.environment for worker in self._live.values()}

    @property
    def tasks(self) -> dict[str, int]:
        """Return how many tasks environments have, of those that say so, by label."""
        return {worker.environment: worker.tasks for worker in self._live.values() if worker.tasks is not None}

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
        worker = min((w for w in self._live.values() if w.environment == job.environment), key=lambda w: len(w.sent))
        worker.sent[job.id] = self._clock()
        self._owners[job.id] = worker
        await self._tell(worker, job)

    async def cancel(self, jobs: Iterable[str]) -> None:
        """Stop jobs; nothing is heard of them any more."""
        by_worker: dict[bytes, list[str]] = {}
        for job in jobs:
            if worker := self._forget(job):
                by_worker.setdefault(worker.identity, []).append(job)
        for identity, cancelled in by_worker.items():
            await self._tell(self._live[identity], Cancel(cancelled))

    def expire(self) -> None:
        """Give up the workers that are silent."""
        now = self._clock()
        for worker in [w for w in self._live.values() if now - w.heard > SILENT_S]:
            self._give_up(worker, "is silent")

    async def _receive(self, identity: bytes, head: bytes, frames: list[bytes]) -> None:
        message = msgspec.msgpack.decode(head, type=ToOrchestrator)
        if isinstance(message, Status):
            await self._reconcile(identity, message)
        elif self._forget(message.job):
            self._on_result(message.job, message.error or _sequences(message, frames))

    async def _reconcile(self, identity: bytes, status: Status) -> None:
        now = self._clock()
        for other in list(self._live.values()):
            if (other.environment, other.number) != (status.environment, status.worker):
                continue
            if other.incarnation != status.incarnation:
                self._give_up(other, "was restarted")
            elif other.identity != identity:  # its connection was lost, and ZMQ made another one
                del self._live[other.identity]
                other.identity = identity
                self._live[identity] = other
        worker = self._live.get(identity)
        if worker is None:
            worker = _Worker(identity, status.environment, status.worker, status.incarnation, now)
            self._live[identity] = worker
            log.info("worker %s %d is up", status.environment, status.worker)
        worker.heard, worker.tasks = now, status.tasks
        running = set(status.jobs)
        for job in [j for j, since in worker.sent.items() if j not in running and now - since > UNSEEN_S]:
            self._forget(job)
            self._on_lost(job)
        unknown = sorted(running - worker.sent.keys())
        if unknown:
            await self._tell(worker, Cancel(unknown))

    def _give_up(self, worker: _Worker, why: str) -> None:
        log.warning("worker %s %d %s; %d jobs are lost", worker.environment, worker.number, why, len(worker.sent))
        del self._live[worker.identity]
        for job in list(worker.sent):
            self._forget(job)
            self._on_lost(job)

    def _forget(self, job: str) -> _Worker | None:
        worker = self._owners.pop(job, None)
        if worker is not None:
            worker.sent.pop(job, None)
        return worker

    async def _tell(self, worker: _Worker, message: ToWorker) -> None:
        await self._socket.send_multipart([worker.identity, msgspec.msgpack.encode(message)])


def _sequences(result: Result, frames: list[bytes]) -> tuple[Rollout, ...] | str:
    """The sequences, or what is wrong with them: a damaged result is a failed rollout."""
    try:
        return decode_sequences(result, frames)
    except (ValueError, msgspec.MsgspecError) as error:
        return f"damaged result: {error}"

"""The orchestrator's end of the job protocol: which environment workers are alive, and which job each of them runs.

A status costs as much with a thousand workers as with one, and a job as much as there are nodes and workers on a node.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from primeslurm.orchestrator.rollouts.job_protocol import (
    Cancel,
    Claims,
    Describe,
    Ended,
    Job,
    Result,
    Send,
    Status,
    ToOrchestrator,
    ToWorker,
    Unusable,
    decode_sequences,
    on_this_node,
    shortened,
)
from primeslurm.orchestrator.rollouts.pieces import LARGEST_PART, is_cut, joined
from primeslurm.orchestrator.rollouts.receive_window import ReceiveWindow
from primeslurm.silence import held_up_s
from primeslurm.wire.batches.rollouts import Frame, Rollout
from primeslurm.wire.decoding import DamagedError, value
from primeslurm.wire.transport import secret

log = logging.getLogger(__name__)

GIVEN_UP_S = 30.0
"""A worker that reports nothing for this long is given up, whoever else there is."""
QUIET_S = 5.0
"""A worker that reports nothing for this long gets no job: it may be gone, with its node."""
TAKEN_BACK_S = 10.0
"""Of a worker that reports nothing for this long others get the jobs, if there are any that report."""
BUSY_SHARE = 0.5
"""One that computed, or waited for a CPU, for more than this share of its silence was held up by its own work."""
UNSEEN_S = 60.0
"""A job that a worker has not seen this long after it was sent is lost: a connection broke on the way."""
RESENT_S = 60.0
"""A result that was asked for and has not come is asked for again after so long."""


class _Sent(NamedTuple):
    """A job on its way to a worker, or with it."""

    number: int
    at: float
    asked: float = -math.inf
    """When its result was asked for."""


@dataclass
class _Node:
    """A node that workers are on."""

    load: int = 0
    """Jobs that its workers were sent and have not ended."""
    workers: int = 0
    """Those that are alive."""
    listening: dict[str, dict[int, _Worker]] = field(default_factory=dict)
    """By environment and number, those that may get jobs: the ones that are not quiet."""


@dataclass
class _Worker:
    """What the pool knows of an environment worker that is alive."""

    identity: bytes
    """Of its connection, as ZMQ names it."""
    environment: str
    number: int
    incarnation: str
    node: _Node
    heard: float
    """When its last status came."""
    sent: dict[str, _Sent] = field(default_factory=dict)
    """Jobs that it was sent and has not ended, by id."""
    runs: frozenset[str] = frozenset()
    """Jobs that its last status said it runs."""
    settled: bool = False
    """Whether its last status had no job that is not known here."""


class WorkerPool:
    """Sends jobs to the least loaded node, and there to the least loaded worker of their environment; collects results.

    Args:
        bind: ZMQ address for the workers.
        on_result: called with (job, sequences) or (job, error text).
        on_lost: called with the id of each job whose worker is gone.
        on_unusable: called with the environment that a worker cannot serve, the worker's number, and why.
        clock: in seconds.
        max_per_node: most jobs at once on one node. Default: no bound.
        claim: called with a job that a worker has and this pool did not send, and whether it has not ended; returns
            whether it is gone on with: then its result comes as if it had been sent. Default: none is.
        keeps: called with a job whose result came; returns whether that is in memory only, and would be lost with this
            process: the worker goes on holding it. Default: none is.
    """

    def __init__(
        self,
        bind: str,
        on_result: Callable[[str, tuple[Rollout, ...] | str], None],
        on_lost: Callable[[str], None],
        on_unusable: Callable[[str, int, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        max_per_node: int | None = None,
        claim: Callable[[Job, bool], bool] = lambda job, runs: False,
        keeps: Callable[[str], bool] = lambda job: False,
    ) -> None:
        self._claim = claim
        self._keeps = keeps
        self._on_result = on_result
        self._on_lost = on_lost
        self._on_unusable = on_unusable
        self._clock = clock
        self._max_per_node = math.inf if max_per_node is None else max_per_node
        self._looked_at = clock()
        self.tasks: dict[str, int] = {}
        """How many tasks environments have, by label, as far as their workers have said so."""
        self._live: dict[tuple[str, int], _Worker] = {}
        """By environment and number."""
        self._patience_s: dict[str, float] = {}
        """By environment: after how much silence others get a worker's jobs, where that was found to be longer."""
        self._taken_back: dict[tuple[str, int, str], float] = {}
        """When workers were heard of before others got their jobs, by environment, number and incarnation."""
        self._nodes: dict[str, _Node] = {}
        self._owners: dict[str, _Worker] = {}
        self._window = ReceiveWindow()
        self._numbers = count(time.monotonic_ns())
        """Greater after a restart of the orchestrator, for workers that have seen others: it restarts on its node."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        secret.demand(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_PART)  # whoever sends more is disconnected
        self._socket.setsockopt(zmq.SNDHWM, 0)  # what is too much for a peer would be dropped
        self._socket.bind(bind)
        if (path := on_this_node(bind)) is not None:
            try:
                self._socket.bind(f"ipc://{path}")
            except zmq.ZMQError as error:
                log.warning("workers of this node take the way of others: %s: %s", path, error)

    @property
    def environments(self) -> set[str]:
        """Return the labels of the environments that have a live worker."""
        return {environment for environment, _ in self._live}

    def settled(self, environments: Collection[str]) -> int:
        """Count the live workers of some environments that have no job that is not known here."""
        return sum(worker.settled for worker in self._live.values() if worker.environment in environments)

    @property
    def load(self) -> dict[str, int]:
        """Return how many jobs each node runs that has a live worker."""
        return {name: node.load for name, node in self._nodes.items() if node.workers}

    @property
    def available(self) -> set[str]:
        """Return the labels of the environments that a job can be sent to now."""
        return {label for node in self._nodes.values() if self._has_room(node) for label in node.listening}

    async def serve(self) -> None:
        """Receive until cancelled.

        What came in pieces is put together in a thread. The next message waits for it: of one worker a result counts
        before the status that lacks its job.
        """
        try:
            while True:
                came = await self._socket.recv_multipart(copy=False)  # parts are views of it; cut ones are copied once
                identity, parts = came[0].bytes, list[Frame](part.buffer for part in came[1:])
                came.clear()
                try:
                    if is_cut(parts):
                        parts = await asyncio.to_thread(joined, parts)
                    if not parts:
                        raise DamagedError("it has no parts")
                    await self._receive(identity, parts[0], parts[1:])
                except DamagedError as error:
                    log.warning("a damaged message from a worker is ignored: %s", error)
                await asyncio.sleep(0)  # many may wait already, which are received without a pause
        finally:
            self._socket.close()

    async def send(self, job: Job) -> None:
        """Give a job to a worker of its environment, which must be available."""
        nodes = [node for node in self._nodes.values() if job.environment in node.listening and self._has_room(node)]
        node = min(nodes, key=lambda node: node.load / node.workers)
        worker = min(node.listening[job.environment].values(), key=lambda worker: len(worker.sent))
        job = msgspec.structs.replace(job, number=next(self._numbers))
        self._give(worker, job)
        await self._tell(worker.identity, job)
        await asyncio.sleep(0)  # thousands may follow: others have their turn in between

    async def cancel(self, jobs: Iterable[str]) -> None:
        """Stop jobs; nothing is heard of them any more."""
        by_worker: dict[bytes, list[str]] = {}
        for job in jobs:
            if worker := self._forget(job):
                by_worker.setdefault(worker.identity, []).append(job)
        for identity, cancelled in by_worker.items():
            await self._tell(identity, Cancel(cancelled))

    def expire(self) -> None:
        """Give up the workers that are silent, and spare those that are quiet."""
        now = self._clock()
        held_up, self._looked_at = held_up_s(self._looked_at, now), now
        for worker in list(self._live.values()):
            worker.heard += held_up
            silence = now - worker.heard
            if silence <= QUIET_S:
                continue
            self._unlist(worker)
            if silence > self._patience(worker):
                self._taken_back[worker.environment, worker.number, worker.incarnation] = worker.heard
                self._give_up(worker, f"has been silent for {silence:.0f} s")

    def _patience(self, worker: _Worker) -> float:
        """How long a worker may be silent: if nobody else can run its jobs, it had better keep them for a while."""
        patience = self._patience_s.get(worker.environment, TAKEN_BACK_S)
        others = any(worker.environment in node.listening for node in self._nodes.values())
        return patience if others else max(patience, GIVEN_UP_S)

    async def _receive(self, identity: bytes, head: Frame, frames: Sequence[Frame]) -> None:
        message: ToOrchestrator = value(head, ToOrchestrator)  # type: ignore[arg-type]  # a union is no type
        if isinstance(message, Status):
            await self._reconcile(identity, message)
        elif isinstance(message, Unusable):
            self._on_unusable(message.environment, message.worker, shortened(message.error))
        elif isinstance(message, Claims):
            await self._take_over(identity, message.jobs)
        elif isinstance(message, Ended):
            if message.job in self._owners:
                self._window.offer(message.job, message.size)
        elif worker := self._forget(message.job):
            worker.heard = self._clock()  # its status waits behind its results, which may take a while
            failure = None if message.error is None else shortened(message.error) or "it failed without a word"
            self._on_result(message.job, failure or _sequences(message, frames))
        await self._ask()

    def _learn_patience(self, status: Status, now: float) -> None:
        """Wait longer for workers of an environment whose own code keeps them from reporting.

        Their rollouts would begin anew elsewhere, where the same code keeps others, over and over. One that stood still
        has computed nothing meanwhile.
        """
        heard = self._taken_back.pop((status.environment, status.worker, status.incarnation), None)
        if heard is None or status.busy_s < BUSY_SHARE * (silence := now - heard):
            return
        self._patience_s[status.environment] = longer = 2.0 * silence
        words = (
            "code of environment %s kept worker %d from reporting for %.0f s: others get jobs after %.0f s from now on"
        )
        log.warning(words, status.environment, status.worker, silence, longer)

    async def _reconcile(self, identity: bytes, status: Status) -> None:
        now = self._clock()
        self._learn_patience(status, now)
        worker = self._live.get((status.environment, status.worker))
        if worker is not None and worker.incarnation > status.incarnation:
            # One that was given up with its node, and lives on: what it runs, its successor was sent.
            if status.jobs or status.held:
                await self._tell(identity, Cancel([*status.jobs, *status.held]))
            return
        if worker is not None and worker.incarnation < status.incarnation:
            self._give_up(worker, "was restarted")
            worker = None
        if worker is None:
            worker = self._add(identity, status, now)
        if worker.identity != identity:  # ZMQ makes another connection where one was lost, with what was on its way
            worker.sent = {job: sent._replace(asked=-math.inf) for job, sent in worker.sent.items()}
        worker.identity, worker.heard = identity, now
        worker.node.listening.setdefault(worker.environment, {})[worker.number] = worker
        running, held = set(status.jobs), set(status.held)
        worker.runs = frozenset(running - held)
        for job in sorted((held - running) & worker.sent.keys()):
            if now - worker.sent[job].asked > RESENT_S:
                self._window.offer(job, status.held[job])
        running |= held
        gone = [job for job, sent in worker.sent.items() if job not in running and _is_lost(sent, status.seen, now)]
        for job in gone:
            self._forget(job)
            self._on_lost(job)
        unknown = sorted(job for job in running - worker.sent.keys() if not (job in held and self._keeps(job)))
        worker.settled = not unknown
        if unknown:
            await self._tell(identity, Describe(unknown))

    async def _ask(self) -> None:
        """Have as many results sent as there is room for."""
        asked: dict[bytes, list[str]] = {}
        for job in self._window.admit():
            worker = self._owners[job]
            worker.sent[job] = worker.sent[job]._replace(asked=self._clock())
            asked.setdefault(worker.identity, []).append(job)
        for identity, jobs in asked.items():
            await self._tell(identity, Send(jobs))

    async def _take_over(self, identity: bytes, jobs: Sequence[Job]) -> None:
        """Go on with jobs of an orchestrator that is no more, and have the others cancelled."""
        worker = next((worker for worker in self._live.values() if worker.identity == identity), None)
        if worker is None:
            return  # it connected anew meanwhile, and is asked again when it reports
        refused = []
        for job in jobs:
            if job.id in self._owners or self._keeps(job.id):
                continue
            if job.environment != worker.environment or not self._claim(job, job.id in worker.runs):
                refused.append(job.id)
                continue
            self._give(worker, job)
        if refused:
            await self._tell(identity, Cancel(refused))

    def _give(self, worker: _Worker, job: Job) -> None:
        worker.sent[job.id] = _Sent(job.number, self._clock())
        worker.node.load += 1
        self._owners[job.id] = worker

    def _has_room(self, node: _Node) -> bool:
        return node.load < self._max_per_node

    def _add(self, identity: bytes, status: Status, now: float) -> _Worker:
        log.info("worker %s %d is up on node %s", status.environment, status.worker, status.node)
        node = self._nodes.setdefault(status.node, _Node())
        worker = _Worker(identity, status.environment, status.worker, status.incarnation, node, now)
        if status.tasks is not None:
            self.tasks[status.environment] = status.tasks
        node.workers += 1
        self._live[status.environment, status.worker] = worker
        return worker

    def _unlist(self, worker: _Worker) -> None:
        listening = worker.node.listening
        if listening.get(worker.environment, {}).pop(worker.number, None) and not listening[worker.environment]:
            del listening[worker.environment]

    def _give_up(self, worker: _Worker, why: str) -> None:
        log.warning("worker %s %d %s; %d jobs are lost", worker.environment, worker.number, why, len(worker.sent))
        del self._live[worker.environment, worker.number]
        self._unlist(worker)
        worker.node.workers -= 1
        for job in list(worker.sent):
            self._forget(job)
            self._on_lost(job)

    def _forget(self, job: str) -> _Worker | None:
        worker = self._owners.pop(job, None)
        self._window.forget(job)
        if worker is not None:
            del worker.sent[job]
            worker.node.load -= 1
        return worker

    async def _tell(self, identity: bytes, message: ToWorker) -> None:
        await self._socket.send_multipart([identity, msgspec.msgpack.encode(message)])


def _is_lost(sent: _Sent, seen: int, now: float) -> bool:
    """Whether a job that its worker does not run will never be heard of. A result comes before its absence.

    Not by time alone: a status may have been written long before it is read, when either side was held up.
    """
    return sent.number <= seen or now - sent.at > UNSEEN_S


def _sequences(result: Result, frames: Sequence[Frame]) -> tuple[Rollout, ...] | str:
    """The sequences, or what is wrong with them: a damaged result is a failed rollout."""
    try:
        return decode_sequences(result, frames)
    except DamagedError as error:
        return f"damaged result: {error}"

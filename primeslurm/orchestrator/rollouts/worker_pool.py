"""The orchestrator's end of the job protocol: which environment workers are alive, and which job each of them runs.

A status costs as much with a thousand workers as with one, and a job as much as there are nodes and workers on a node.

Rollouts that a worker died with run apart from others until it is known which of them kills workers (`WorkerDeaths`).
At most half of an environment's workers, and at least one, are apart at once.
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

from primeslurm.base.unresponsive_timer import scheduling_delay_s
from primeslurm.orchestrator.rollouts.job_protocol import (
    Cancel,
    Claims,
    Describe,
    Ended,
    Job,
    JobFailure,
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
from primeslurm.orchestrator.rollouts.message_chunks import LARGEST_PART, is_cut, joined
from primeslurm.orchestrator.rollouts.receive_window import ReceiveWindow
from primeslurm.orchestrator.rollouts.worker_deaths import WorkerDeaths
from primeslurm.orchestrator.rollouts.worker_events import (
    EnginesAnswered,
    JobKeeper,
    JobLost,
    KeepNothing,
    RolloutEnded,
    WorkerDied,
    WorkerEvent,
    WorkerUnusable,
)
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
UNRESOLVED_S = 900.0
"""Longest wait to hear again of a worker that fell silent while it ran suspects apart."""
RESENT_S = 60.0
"""A result that was asked for and has not come is asked for again after so long."""


class _Sent(NamedTuple):
    """A job on its way to a worker, or with it."""

    job: Job
    at: float
    asked: float = -math.inf
    """When its result was asked for."""


class _Silenced(NamedTuple):
    """A worker that was given up because it was silent. It hangs, or will be heard of again, or is lost."""

    worker: _Worker
    jobs: list[Job]
    """What it ran."""
    at: float


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
    apart: bool = False
    """Whether it gets only jobs of suspects."""

    @property
    def jobs(self) -> list[Job]:
        """Return the jobs that it was sent and has not ended."""
        return [sent.job for sent in self.sent.values()]


class WorkerPool:
    """Sends jobs to the least loaded node, and there to the least loaded worker of their environment; collects results.

    Args:
        bind: ZMQ address for the workers.
        keeper: decides which jobs of an earlier orchestrator are adopted, and which results workers keep. None: none.
        clock: in seconds.
        max_per_node: most jobs at once on one node. Default: no bound.
        deaths: what is known of tasks that kill workers.
    """

    def __init__(
        self,
        bind: str,
        keeper: JobKeeper | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_per_node: int | None = None,
        deaths: WorkerDeaths | None = None,
    ) -> None:
        self._deaths = WorkerDeaths() if deaths is None else deaths
        self._waiting: dict[str, Job] = {}
        """Jobs of suspects that wait for a worker, by id."""
        self._has_apart = False
        """Whether a worker is, or may be, apart."""
        self._silenced: dict[tuple[str, int], _Silenced] = {}
        """By environment and number, workers that were given up because they were silent."""
        self._keeper = keeper or KeepNothing()
        self._events: list[WorkerEvent] = []
        """Events that `receive` and `expire` return next."""
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

    async def receive(self) -> list[WorkerEvent]:
        """Receive one message of a worker, and return its events in order.

        Handle them before the next call: a result must count before the status that lacks its job.
        """
        await asyncio.sleep(0)  # many messages may wait, which are received without a pause
        # Frames are views of the received message; cut ones are copied once.
        message = await self._socket.recv_multipart(copy=False)
        identity, parts = message[0].bytes, list[Frame](part.buffer for part in message[1:])
        message.clear()
        try:
            if is_cut(parts):
                parts = await asyncio.to_thread(joined, parts)
            if not parts:
                raise DamagedError("it has no parts")
            await self._receive(identity, parts[0], parts[1:])
        except DamagedError as error:
            log.warning("a damaged message from a worker is ignored: %s", error)
        return self._take_events()

    def close(self) -> None:
        """Close the connection to the workers."""
        self._socket.close()

    def _take_events(self) -> list[WorkerEvent]:
        events, self._events = self._events, []
        return events

    async def send(self, job: Job) -> None:
        """Give a job to a worker of its environment, which must be available. A suspect may wait for a worker apart."""
        if self._deaths.together(job) is None:
            await self._send(job)
        else:
            self._waiting[job.id] = job
            await self._send_suspects()

    async def _send(self, job: Job) -> None:
        nodes = [node for node in self._nodes.values() if job.environment in node.listening and self._has_room(node)]
        node = min(nodes, key=lambda node: node.load / node.workers)
        await self._send_to(min(node.listening[job.environment].values(), key=lambda worker: len(worker.sent)), job)
        await asyncio.sleep(0)  # thousands may follow: others have their turn in between

    async def _send_to(self, worker: _Worker, job: Job) -> None:
        job = msgspec.structs.replace(job, number=next(self._numbers))
        self._give(worker, job)
        await self._tell(worker.identity, job)

    async def _send_suspects(self) -> None:
        """Send the suspects' jobs that a worker can take now, the most suspicious first."""
        for job in sorted(self._waiting.values(), key=lambda job: self._deaths.together(job) or math.inf):
            together = self._deaths.together(job)
            if together is None:
                if job.environment not in self.available:
                    continue
                del self._waiting[job.id]
                await self._send(job)
            elif (worker := self._apart(job, together)) is not None:
                del self._waiting[job.id]
                await self._send_to(worker, job)
        for worker in self._live.values():
            if worker.apart and not worker.sent and not self._has_suspects(worker.environment):
                worker.apart = False
                self._list(worker)
        self._has_apart = any(worker.apart for worker in self._live.values())

    def _has_suspects(self, environment: str) -> bool:
        return any(job.environment == environment for job in self._waiting.values())

    def _holds(self, silenced: _Silenced, job: Job) -> bool:
        if not silenced.worker.apart or self._clock() - silenced.at > UNRESOLVED_S:
            return False
        return any(other.task_key == job.task_key for other in silenced.jobs)

    def _apart(self, job: Job, together: int) -> _Worker | None:
        """Find a worker for a suspect's job: one that runs few enough suspects, and nothing else.

        None while it is open what became of the worker that the task was apart in: if the task hangs, it would take one
        worker after another.
        """
        if any(self._holds(silenced, job) for silenced in self._silenced.values()):
            return None
        workers = [worker for worker in self._live.values() if worker.environment == job.environment]
        apart = [worker for worker in workers if worker.apart]
        now, died = self._clock(), self._deaths.last_worker(job)
        usable = [worker for worker in workers if len(workers) == 1 or worker.number != died]
        heard = [worker for worker in usable if now - worker.heard <= QUIET_S and self._has_room(worker.node)]
        for worker in apart:
            limits = [self._deaths.together(other) for other in worker.jobs]
            tasks = {other.task_key for other in worker.jobs} | {job.task_key}
            alone = all(limit is not None and len(tasks) <= limit for limit in [*limits, together])
            if worker in heard and alone:
                return worker
        others = [worker for worker in heard if not worker.apart]
        idle = next((worker for worker in apart if not worker.sent), None)
        if others and idle is not None:
            idle.apart = False
            self._list(idle)
        if others and (idle is not None or len(apart) < max(1, len(workers) // 2)):
            chosen = min(others, key=lambda worker: len(worker.sent))
            chosen.apart = self._has_apart = True
            self._unlist(chosen)
            return None if chosen.sent else chosen
        return None

    async def cancel(self, jobs: Iterable[str]) -> None:
        """Stop jobs; nothing is heard of them any more."""
        by_worker: dict[bytes, list[str]] = {}
        for job in jobs:
            self._waiting.pop(job, None)
            if worker := self._forget(job):
                by_worker.setdefault(worker.identity, []).append(job)
        for identity, cancelled in by_worker.items():
            await self._tell(identity, Cancel(cancelled))

    def expire(self) -> list[WorkerEvent]:
        """Give up the workers that are silent, and spare those that are quiet."""
        now = self._clock()
        held_up, self._looked_at = scheduling_delay_s(self._looked_at, now), now
        for worker in list(self._live.values()):
            worker.heard += held_up
            silence = now - worker.heard
            if silence <= QUIET_S:
                continue
            self._unlist(worker)
            if silence > self._patience(worker):
                self._taken_back[worker.environment, worker.number, worker.incarnation] = worker.heard
                self._silenced[worker.environment, worker.number] = _Silenced(worker, worker.jobs, now)
                self._give_up(worker, f"has been silent for {silence:.0f} s")
        return self._take_events()

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
            self._events.append(WorkerUnusable(message.environment, message.worker, shortened(message.error)))
        elif isinstance(message, Claims):
            await self._take_over(identity, message.jobs)
        elif isinstance(message, Ended):
            if message.job in self._owners:
                self._window.offer(message.job, message.size)
        elif message.job in self._owners:
            worker = self._owners[message.job]
            self._deaths.ended(worker.sent[message.job].job)
            self._forget(message.job)
            worker.heard = self._clock()  # its status waits behind its results, which may take a while
            self._events.append(RolloutEnded(message.job, _outcome(message, frames)))
        await self._ask()
        if self._waiting or self._has_apart:
            await self._send_suspects()

    def _note_silenced(self, status: Status) -> None:
        """Find out what became of a worker that was given up because it was silent: it lives, or hung and was ended."""
        key = status.environment, status.worker
        silenced = self._silenced.get(key)
        if silenced is None or status.incarnation < silenced.worker.incarnation:
            return
        del self._silenced[key]
        worker = silenced.worker
        if status.incarnation > worker.incarnation and worker.node is self._nodes.get(status.node):
            self._died(worker, silenced.jobs)

    def _died(self, worker: _Worker, jobs: Sequence[Job]) -> None:
        if jobs:
            guilty = self._deaths.died(jobs, worker.number)
            self._events.append(WorkerDied(worker.environment, worker.number, guilty))

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
        if status.answers:
            self._events.append(EnginesAnswered(status.answers))
        self._note_silenced(status)
        worker = self._live.get((status.environment, status.worker))
        if worker is not None and worker.incarnation > status.incarnation:
            # One that was given up with its node, and lives on: what it runs, its successor was sent.
            if status.jobs or status.held:
                await self._tell(identity, Cancel([*status.jobs, *status.held]))
            return
        if worker is not None and worker.incarnation < status.incarnation:
            if worker.node is self._nodes.get(status.node):  # elsewhere, it is its node that was lost
                self._died(worker, worker.jobs)
            self._give_up(worker, "was restarted")
            worker = None
        if worker is None:
            worker = self._add(identity, status, now)
        if worker.identity != identity:  # ZMQ makes another connection where one was lost, with what was on its way
            worker.sent = {job: sent._replace(asked=-math.inf) for job, sent in worker.sent.items()}
        worker.identity, worker.heard = identity, now
        self._list(worker)
        running, held = set(status.jobs), set(status.held)
        worker.runs = frozenset(running - held)
        for job in sorted((held - running) & worker.sent.keys()):
            if now - worker.sent[job].asked > RESENT_S:
                self._window.offer(job, status.held[job])
        running |= held
        gone = [job for job, sent in worker.sent.items() if job not in running and _is_lost(sent, status.seen, now)]
        for job in gone:
            self._forget(job)
            self._events.append(JobLost(job))
        unsent = running - worker.sent.keys()
        unknown = sorted(job for job in unsent if not (job in held and self._keeper.holds_result(job)))
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
            if job.id in self._owners or self._keeper.holds_result(job.id):
                continue
            if job.environment != worker.environment or not self._keeper.adopt_job(job, runs=job.id in worker.runs):
                refused.append(job.id)
                continue
            self._give(worker, job)
        if refused:
            await self._tell(identity, Cancel(refused))

    def _give(self, worker: _Worker, job: Job) -> None:
        worker.sent[job.id] = _Sent(job, self._clock())
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

    def _list(self, worker: _Worker) -> None:
        if not worker.apart:
            worker.node.listening.setdefault(worker.environment, {})[worker.number] = worker

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
            self._events.append(JobLost(job))

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
    return sent.job.number <= seen or now - sent.at > UNSEEN_S


def _outcome(result: Result, frames: Sequence[Frame]) -> tuple[Rollout, ...] | JobFailure:
    """The sequences, or why there are none: a damaged result is a failed rollout."""
    if result.error is not None:
        return JobFailure(shortened(result.error) or "it failed without a word", result.cause)
    try:
        return decode_sequences(result, frames)
    except DamagedError as error:
        return JobFailure(f"damaged result: {error}")

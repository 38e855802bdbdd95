"""The orchestrator's end of the job protocol: it tracks environment workers, sends them jobs and collects results.

The cost of a status does not depend on the number of workers. The cost of a job grows with the number of nodes and of
workers on one node.

Tasks whose worker died are suspects: until it is known which of them kills workers (`WorkerDeaths`), they run in
isolated workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from primeslurm.base.unresponsive_timer import scheduling_delay_s
from primeslurm.orchestrator.rollouts.flow_control import MAX_FRAME_BYTES, ReceiveWindow, join_frames
from primeslurm.orchestrator.rollouts.job_protocol import (
    AnswerCounts,
    Cancel,
    Describe,
    Job,
    JobDescriptions,
    JobFailure,
    Result,
    ResultReady,
    SendResults,
    Status,
    ToOrchestrator,
    ToWorker,
    Unusable,
    decode_sequences,
    on_this_node,
    shortened,
)
from primeslurm.orchestrator.rollouts.worker_deaths import WorkerDeaths
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import DamagedError, decode_msgpack
from primeslurm.wire.transport import curve

log = logging.getLogger(__name__)
NO_NEW_JOBS_S = 5.0  # a worker without a heartbeat for this long gets no new jobs, because it may be lost with its node
# After this time without a heartbeat, a worker's jobs are reassigned, if other workers of its environment respond.
REASSIGN_S = 10.0
# A worker without a heartbeat for this long is given up, even if it is the only one of its environment.
GIVE_UP_S = 30.0
# A worker that computed or waited for a CPU for more than this fraction of a gap between heartbeats was busy.
BUSY_FRACTION = 0.5
# A job that its worker has not received after this time is lost, because a connection broke on the way.
DELIVERY_TIMEOUT_S = 60.0
UNRESOLVED_S = 900.0  # how long a suspect waits to learn what became of an unresponsive worker that ran it in isolation
BURST = 16  # messages after which other tasks get to run
RESEND_S = 60.0  # a result that was requested this long ago and has not arrived is requested again


class RolloutEnded(NamedTuple):
    """A job ended, with the token sequences of its rollout or with a failure."""

    job: str
    outcome: tuple[Rollout, ...] | JobFailure


class JobLost(NamedTuple):
    """The worker of a job has ended, so the job will not end."""

    job: str


class WorkerUnusable(NamedTuple):
    """A worker cannot serve its environment."""

    environment: str
    worker: int
    error: str


class WorkerDied(NamedTuple):
    """A worker died while it ran jobs. `JobLost` follows for each of them."""

    environment: str
    worker: int
    guilty: Sequence[Job]  # one job of each task that is now known to kill workers


class EnginesAnswered(NamedTuple):
    """A worker counted the answers of engines, by address."""

    answers: Mapping[str, AnswerCounts]


WorkerEvent = RolloutEnded | JobLost | WorkerUnusable | WorkerDied | EnginesAnswered


class JobKeeper:
    """Decides which jobs and results the workers keep: by default none."""

    def adopt_job(self, job: Job, *, runs: bool) -> bool:
        """Adopt a job that an earlier orchestrator sent. `runs`: it has not ended. False: it is not needed."""
        return False

    def holds_result(self, job: str) -> bool:
        """Return whether a result is only in memory here, so that the worker must keep it."""
        return False


class _Sent(NamedTuple):
    """A job that was sent to a worker."""

    job: Job
    at: float
    requested: float = -math.inf  # time at which its result was requested


class _Unresponsive(NamedTuple):
    """A worker that was given up without a heartbeat. It may hang, be lost, or respond again."""

    worker: _Worker
    jobs: list[Job]  # jobs that it ran
    at: float


@dataclass
class _Node:
    """A node with workers."""

    load: int = 0  # unfinished jobs of its workers
    workers: int = 0  # number of live workers
    # Workers that may get jobs, by environment and number.
    listening: dict[str, dict[int, _Worker]] = field(default_factory=dict)


@dataclass
class _Worker:
    """A live environment worker."""

    identity: bytes  # ZMQ's name of its connection
    environment: str
    number: int
    incarnation: str
    node: _Node
    heard: float  # time of its last heartbeat
    sent: dict[str, _Sent] = field(default_factory=dict)  # unfinished jobs by id
    runs: frozenset[str] = frozenset()  # jobs that run, by its last status
    settled: bool = False  # whether its last status had only jobs that are known here
    isolated: bool = False  # whether it gets only jobs of suspects

    @property
    def jobs(self) -> list[Job]:
        return [sent.job for sent in self.sent.values()]


class WorkerPool:
    """Sends each job to the least loaded worker of the least loaded node, and collects results.

    Args:
        keeper: Decides which jobs of an earlier orchestrator are adopted, and which results workers keep. None: none.
        max_per_node: Maximum number of concurrent jobs per node. None: no limit.
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
        self._waiting: dict[str, Job] = {}  # jobs of suspects that wait for a worker, by id
        self._has_isolated = False  # whether a worker is, or may be, isolated
        # Workers that were given up without a heartbeat, by environment and number.
        self._unresponsive: dict[tuple[str, int], _Unresponsive] = {}
        self._keeper = keeper or JobKeeper()
        self._events: list[WorkerEvent] = []  # events that `receive` and `expire` return next
        self._clock = clock
        self._max_per_node = math.inf if max_per_node is None else max_per_node
        self._checked_at = clock()
        self.tasks: dict[str, int] = {}  # number of tasks by environment, as reported by workers
        self._live: dict[tuple[str, int], _Worker] = {}  # live workers by environment and number
        self._reassign_s: dict[str, float] = {}  # REASSIGN_S by environment, where a longer time was learned
        # Time of the last heartbeat of workers whose jobs were reassigned, by environment, number and incarnation.
        self._reassigned: dict[tuple[str, int, str], float] = {}
        self._nodes: dict[str, _Node] = {}
        self._owners: dict[str, _Worker] = {}
        self._window = ReceiveWindow()
        # Numbers must be greater than those of an earlier orchestrator, which workers may have seen. The monotonic
        # clock ensures that, because an orchestrator restarts on the same node.
        self._numbers = count(time.monotonic_ns())
        self._socket = zmq.asyncio.Context.instance(curve.IO_THREADS).socket(zmq.ROUTER)
        curve.secure_server(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # ZMQ disconnects a peer that sends more
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops messages above the limit
        self._socket.bind(bind)
        self._waiting_messages: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._messages = 0
        if (path := on_this_node(bind)) is not None:
            try:
                self._socket.bind(f"ipc://{path}")
            except zmq.ZMQError as error:
                log.warning("workers of this node connect through TCP: %s: %s", path, error)

    @property
    def environments(self) -> set[str]:
        return {environment for environment, _ in self._live}

    def count_settled(self, environments: Collection[str]) -> int:
        """Return the number of live workers of some environments that have only jobs that are known here."""
        return sum(worker.settled for worker in self._live.values() if worker.environment in environments)

    @property
    def load(self) -> dict[str, int]:
        return {name: node.load for name, node in self._nodes.items() if node.workers}

    @property
    def available(self) -> set[str]:
        """Return the labels of the environments that a job can be sent to now."""
        return {label for node in self._nodes.values() if self._has_slot(node) for label in node.listening}

    async def receive(self) -> list[WorkerEvent]:
        """Receive one message of a worker, and return its events in order.

        Handle them before the next call: a result must count before the status that lacks its job.
        """
        await self._pause()
        # Frames are views of the received message, and chunks are copied once.
        try:  # of the socket without asyncio, because its futures cost more than the messages that wait already
            message = self._waiting_messages.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            message = await self._socket.recv_multipart(copy=False)
        identity, frames = message[0].bytes, list[Frame](frame.buffer for frame in message[1:])
        message.clear()
        try:
            if len(frames) > 1:  # chunks of large frames, which a thread copies
                frames = await asyncio.to_thread(join_frames, frames)
            else:
                frames = join_frames(frames)
            if not frames:
                raise DamagedError("it has no frames")
            await self._receive(identity, frames)
        except DamagedError as error:
            log.warning("ignored a damaged message from a worker: %s", error)
        return self._take_events()

    async def _pause(self) -> None:
        """Let other tasks run once in BURST messages, as thousands may be sent or received without a pause."""
        self._messages += 1
        if self._messages % BURST == 0:
            await asyncio.sleep(0)

    def close(self) -> None:
        self._socket.close()

    def _take_events(self) -> list[WorkerEvent]:
        events, self._events = self._events, []
        return events

    async def send(self, job: Job) -> None:
        """Send a job to a worker of its environment, which must be available. A suspect waits for an isolated one."""
        if self._deaths.together(job) is None:
            await self._send(job)
        else:
            self._waiting[job.id] = job
            await self._send_suspects()

    async def _send(self, job: Job) -> None:
        nodes = [node for node in self._nodes.values() if job.environment in node.listening and self._has_slot(node)]
        node = min(nodes, key=lambda node: node.load / node.workers)
        await self._send_to(min(node.listening[job.environment].values(), key=lambda worker: len(worker.sent)), job)
        await self._pause()

    async def _send_to(self, worker: _Worker, job: Job) -> None:
        job = msgspec.structs.replace(job, number=next(self._numbers))
        self._assign(worker, job)
        await self._tell(worker.identity, job)

    async def _send_suspects(self) -> None:
        """Send the suspects' jobs that a worker can take now, the most suspicious first."""
        for job in sorted(self._waiting.values(), key=lambda job: self._deaths.together(job) or math.inf):
            together = self._deaths.together(job)
            if together is None:  # cleared meanwhile
                if job.environment not in self.available:
                    continue
                del self._waiting[job.id]
                await self._send(job)
            elif (worker := self._isolated_worker(job, together)) is not None:
                del self._waiting[job.id]
                await self._send_to(worker, job)
        wanted = {job.environment for job in self._waiting.values()}
        for worker in self._live.values():
            if worker.isolated and not worker.sent and worker.environment not in wanted:
                self._end_isolation(worker)
        self._has_isolated = any(worker.isolated for worker in self._live.values())

    def _isolated_worker(self, job: Job, together: int) -> _Worker | None:
        """Return a worker for a suspect's job: one that runs few enough suspects, and nothing else. None: wait."""
        # If it is unknown what became of the worker that ran the task in isolation, wait: a task that hangs would take
        # one worker after another.
        if any(self._may_run(unresponsive, job) for unresponsive in self._unresponsive.values()):
            return None
        workers = [worker for worker in self._live.values() if worker.environment == job.environment]
        isolated = [worker for worker in workers if worker.isolated]
        now, died = self._clock(), self._deaths.last_worker(job)
        usable = [
            worker
            for worker in workers
            if (len(workers) == 1 or worker.number != died)
            and now - worker.heard <= NO_NEW_JOBS_S
            and self._has_slot(worker.node)
        ]
        for worker in isolated:
            limits = [self._deaths.together(other) for other in worker.jobs]
            tasks = {other.task_key for other in worker.jobs} | {job.task_key}
            fits = all(limit is not None and len(tasks) <= limit for limit in [*limits, together])
            if worker in usable and fits:
                return worker
        others = [worker for worker in usable if not worker.isolated]
        idle = next((worker for worker in isolated if not worker.sent), None)
        if others and idle is not None:
            self._end_isolation(idle)
        if others and (idle is not None or len(isolated) < max(1, len(workers) // 2)):
            chosen = min(others, key=lambda worker: len(worker.sent))
            chosen.isolated = self._has_isolated = True
            self._unlist(chosen)
            return None if chosen.sent else chosen  # it takes suspects once its other jobs have ended
        return None

    def _may_run(self, unresponsive: _Unresponsive, job: Job) -> bool:
        if not unresponsive.worker.isolated or self._clock() - unresponsive.at > UNRESOLVED_S:
            return False
        return any(other.task_key == job.task_key for other in unresponsive.jobs)

    def _end_isolation(self, worker: _Worker) -> None:
        worker.isolated = False
        self._list(worker)

    async def cancel(self, jobs: Iterable[str]) -> None:
        by_worker: dict[bytes, list[str]] = {}
        for job in jobs:
            self._waiting.pop(job, None)
            if worker := self._forget(job):
                by_worker.setdefault(worker.identity, []).append(job)
        for identity, cancelled in by_worker.items():
            await self._tell(identity, Cancel(cancelled))

    def expire(self) -> list[WorkerEvent]:
        """Give up unresponsive workers, and stop sending jobs to those without a recent heartbeat."""
        now = self._clock()
        # While this process itself was delayed, no heartbeat could be received.
        delay_s, self._checked_at = scheduling_delay_s(self._checked_at, now), now
        for worker in list(self._live.values()):
            worker.heard += delay_s
            gap_s = now - worker.heard
            if gap_s <= NO_NEW_JOBS_S:
                continue
            self._unlist(worker)
            if gap_s > self._timeout_s(worker):
                self._reassigned[worker.environment, worker.number, worker.incarnation] = worker.heard
                self._unresponsive[worker.environment, worker.number] = _Unresponsive(worker, worker.jobs, now)
                self._give_up(worker, f"has sent no heartbeat for {gap_s:.0f} s")
        return self._take_events()

    def _timeout_s(self, worker: _Worker) -> float:
        reassign_s = self._reassign_s.get(worker.environment, REASSIGN_S)
        has_others = any(worker.environment in node.listening for node in self._nodes.values())
        return reassign_s if has_others else max(reassign_s, GIVE_UP_S)

    async def _receive(self, identity: bytes, frames: Sequence[Frame]) -> None:
        while frames:
            message: ToOrchestrator = decode_msgpack(frames[0], ToOrchestrator)  # type: ignore[arg-type]  # a union
            end = 1 + (sum(message.frames) if isinstance(message, Result) else 0)
            await self._handle(identity, message, frames[1:end])
            frames = frames[end:]  # the next result
        await self._request_results()
        if self._waiting or self._has_isolated:
            await self._send_suspects()

    async def _handle(self, identity: bytes, message: ToOrchestrator, frames: Sequence[Frame]) -> None:
        if isinstance(message, Status):
            await self._reconcile(identity, message)
        elif isinstance(message, Unusable):
            self._events.append(WorkerUnusable(message.environment, message.worker, shortened(message.error)))
        elif isinstance(message, JobDescriptions):
            await self._adopt(identity, message.jobs)
        elif isinstance(message, ResultReady):
            if message.job in self._owners:
                self._window.offer(message.job, message.size)
        elif message.job in self._owners:
            worker = self._owners[message.job]
            self._deaths.ended(worker.sent[message.job].job)
            self._forget(message.job)
            worker.heard = self._clock()  # its heartbeats wait behind its results, which may take a while
            self._events.append(RolloutEnded(message.job, _outcome(message, frames)))

    def _resolve_unresponsive(self, status: Status) -> None:
        """Learn from a status whether an unresponsive worker responds again, or hung and was restarted."""
        key = status.environment, status.worker
        unresponsive = self._unresponsive.get(key)
        if unresponsive is None or status.incarnation < unresponsive.worker.incarnation:
            return
        del self._unresponsive[key]
        worker = unresponsive.worker
        if status.incarnation > worker.incarnation and worker.node is self._nodes.get(status.node):
            self._died(worker, unresponsive.jobs)

    def _died(self, worker: _Worker, jobs: Sequence[Job]) -> None:
        if jobs:
            guilty = self._deaths.died(jobs, worker.number)
            self._events.append(WorkerDied(worker.environment, worker.number, guilty))

    def _learn_timeout(self, status: Status, now: float) -> None:
        """If a worker's own code delayed its heartbeats, wait longer for workers of its environment from now on."""
        # Otherwise its rollouts would be reassigned over and over, because the same code delays the next worker, too. A
        # worker that was stopped has computed nothing meanwhile.
        heard = self._reassigned.pop((status.environment, status.worker, status.incarnation), None)
        if heard is None or status.busy_s < BUSY_FRACTION * (gap_s := now - heard):
            return
        self._reassign_s[status.environment] = longer_s = 2.0 * gap_s
        text = "code of environment %s delayed heartbeats of worker %d for %.0f s: jobs are now reassigned after %.0f s"
        log.warning(text, status.environment, status.worker, gap_s, longer_s)

    async def _reconcile(self, identity: bytes, status: Status) -> None:
        now = self._clock()
        self._learn_timeout(status, now)
        if status.answers:
            self._events.append(EnginesAnswered(status.answers))
        self._resolve_unresponsive(status)
        worker = self._live.get((status.environment, status.worker))
        if worker is not None and worker.incarnation > status.incarnation:
            # An old incarnation, which was given up with its node, still runs. Its successor has got its jobs.
            if status.jobs or status.held:
                await self._tell(identity, Cancel([*status.jobs, *status.held]))
            return
        if worker is not None and worker.incarnation < status.incarnation:
            if worker.node is self._nodes.get(status.node):  # on another node, the old node was lost, not the worker
                self._died(worker, worker.jobs)
            self._give_up(worker, "was restarted")
            worker = None
        if worker is None:
            worker = self._add(identity, status, now)
        if worker.identity != identity:  # ZMQ has reconnected, so results in flight on the old connection are lost
            worker.sent = {job: sent._replace(requested=-math.inf) for job, sent in worker.sent.items()}
        worker.identity, worker.heard = identity, now
        self._list(worker)
        running, held = set(status.jobs), set(status.held)
        worker.runs = frozenset(running - held)
        for job in sorted((held - running) & worker.sent.keys()):
            if now - worker.sent[job].requested > RESEND_S:
                self._window.offer(job, status.held[job])
        running |= held
        lost = [job for job, sent in worker.sent.items() if job not in running and _is_lost(sent, status.seen, now)]
        for job in lost:
            self._forget(job)
            self._events.append(JobLost(job))
        unsent = running - worker.sent.keys()
        unknown = sorted(job for job in unsent if not (job in held and self._keeper.holds_result(job)))
        worker.settled = not unknown
        if unknown:
            await self._tell(identity, Describe(unknown))

    async def _request_results(self) -> None:
        by_worker: dict[bytes, list[str]] = {}
        for job in self._window.admit():
            worker = self._owners[job]
            worker.sent[job] = worker.sent[job]._replace(requested=self._clock())
            by_worker.setdefault(worker.identity, []).append(job)
        for identity, jobs in by_worker.items():
            await self._tell(identity, SendResults(jobs))

    async def _adopt(self, identity: bytes, jobs: Sequence[Job]) -> None:
        """Adopt jobs of an earlier orchestrator, and cancel the others."""
        worker = next((worker for worker in self._live.values() if worker.identity == identity), None)
        if worker is None:
            return  # it has reconnected, and is asked again when it reports
        refused = []
        for job in jobs:
            if job.id in self._owners or self._keeper.holds_result(job.id):
                continue
            if job.environment == worker.environment and self._keeper.adopt_job(job, runs=job.id in worker.runs):
                self._assign(worker, job)
            else:
                refused.append(job.id)
        if refused:
            await self._tell(identity, Cancel(refused))

    def _assign(self, worker: _Worker, job: Job) -> None:
        worker.sent[job.id] = _Sent(job, self._clock())
        worker.node.load += 1
        self._owners[job.id] = worker

    def _has_slot(self, node: _Node) -> bool:
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
        if not worker.isolated:
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
    # A result arrives before the status without its job, so a job that the worker has received and no longer lists is
    # lost. Time alone proves little: a status may be read long after it was written, if either side was delayed.
    return sent.job.number <= seen or now - sent.at > DELIVERY_TIMEOUT_S


def _outcome(result: Result, frames: Sequence[Frame]) -> tuple[Rollout, ...] | JobFailure:
    if result.error is not None:
        return JobFailure(shortened(result.error) or "it failed without an error text", result.cause)
    try:
        return decode_sequences(result, frames)
    except DamagedError as error:
        return JobFailure(f"damaged result: {error}")

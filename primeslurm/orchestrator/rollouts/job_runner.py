"""The worker's end of the job protocol: it receives jobs, runs them concurrently, and holds their results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from primeslurm.orchestrator.rollouts.flow_control import CHUNK_BYTES, to_chunks
from primeslurm.orchestrator.rollouts.job_protocol import (
    AnswerCounts,
    Cancel,
    Describe,
    Job,
    JobDescriptions,
    Result,
    ResultReady,
    RolloutError,
    SendResults,
    Status,
    ToWorker,
    Unusable,
    encode_result,
    in_words,
    nearest,
)
from primeslurm.records.heartbeats import liveness
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import DamagedError, decode_msgpack
from primeslurm.wire.transport import curve, secret

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0
NOTICE_S = 5.0  # how long `give_notice` waits for the orchestrator
# Maximum size of sent results that a worker holds [bytes]. It drops the oldest first. If the orchestrator is then
# killed before their group is on disk, they are sampled again.
HELD_BYTES = 1 << 30
# A result of at most this size is sent without a request [bytes]: a thousand of them are less than the receive window.
SMALL_RESULT = CHUNK_BYTES
LARGEST_JOB = 16 << 20  # maximum size of a message to a worker [bytes]


def give_notice(environment: str, number: int, address: str, error: BaseException) -> None:
    """Tell the orchestrator why this worker cannot start its environment."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        curve.secure_client(socket)
        socket.setsockopt(zmq.LINGER, int(NOTICE_S * 1000))
        socket.connect(address)
        socket.send_multipart(to_chunks([msgspec.msgpack.encode(Unusable(environment, number, in_words(error)))]))


class JobRunner:
    """Runs all jobs that it receives.

    Args:
        rollout: Runs a job and returns its token sequences. Any exception makes the job fail.
        answers: Returns counts of engines' answers since its last call, by address.
    """

    def __init__(
        self,
        environment: str,
        number: int,
        address: str,
        rollout: Callable[[Job], Awaitable[tuple[Rollout, ...]]],
        tasks: int | None = None,
        node: str = "",
        answers: Callable[[], dict[str, AnswerCounts]] = dict,
    ) -> None:
        self._answers = answers
        self._environment = environment
        self._number = number
        self._rollout = rollout
        self._tasks = tasks
        self._node = node
        # The orchestrator ignores a worker with a smaller incarnation than it knows. After a move to a node whose clock
        # is behind, the worker is ignored until the old one has been given up.
        self._incarnation = f"{time.time_ns():016x}"
        self._running: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, Job] = {}  # jobs that run, and finished ones whose results are here
        self._unsent: dict[str, list[Frame]] = {}  # results that were not requested yet
        self._held: dict[str, list[Frame]] = {}  # results that were sent, oldest first
        self._held_bytes = 0
        self._small: list[str] = []  # finished jobs whose small results the next message carries
        self._seen = 0
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        curve.secure_client(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_JOB)
        self._handshakes = curve.handshakes(self._socket)
        self._socket.connect(nearest(address))

    async def serve(self) -> None:
        """Serve until cancelled. Raise SecretError if another run listens at the orchestrator's address."""
        # After a restart, the worker finds its own orchestrator there, or the run starts again with other ports.
        refused = asyncio.create_task(curve.refused(self._handshakes))
        tasks = [asyncio.create_task(self._report()), asyncio.create_task(self._listen()), refused]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if refused.done():
                raise secret.SecretError(f"{refused.result()}: another run listens there")
            await asyncio.gather(*(task for task in tasks if task.done()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            running = list(self._running.values())
            self._running.clear()
            for job in running:
                job.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Close the connection. Only needed without `serve`, which does so at its end."""
        # The monitor ends first: an event that nobody can receive would block ZMQ's I/O thread forever, and with it all
        # sockets of this process.
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close()
            self._handshakes.close()

    async def _listen(self) -> None:
        while True:
            head, *_ = await self._socket.recv_multipart()
            try:
                message: ToWorker = decode_msgpack(head, ToWorker)  # type: ignore[arg-type]  # a union is no type
            except DamagedError as error:
                log.warning("ignored a damaged message of the orchestrator: %s", error)
                continue
            if isinstance(message, Describe):
                jobs = [self._jobs[job] for job in message.jobs if job in self._jobs]
                await self._send([msgspec.msgpack.encode(JobDescriptions(jobs))])
            elif isinstance(message, SendResults):
                for job in message.jobs:
                    await self._send_results([job])
            else:
                self.handle(message)

    def handle(self, message: Job | Cancel) -> None:
        """Start a job that is new, or cancel jobs and drop their results."""
        if isinstance(message, Cancel):
            for job in message.jobs:
                self._drop(job)
                if task := self._running.pop(job, None):
                    task.cancel()
        elif message.id not in self._jobs:
            self._seen = max(self._seen, message.number)
            self._jobs[message.id] = message
            self._running[message.id] = asyncio.create_task(self._run(message))

    async def _send(self, message: Sequence[Frame]) -> None:
        await self._socket.send_multipart(to_chunks(message), copy=False)

    async def _send_results(self, jobs: Sequence[str]) -> None:
        """Send the results that are still here, in one message."""
        message: list[Frame] = []
        for job in jobs:
            if (result := self._unsent.pop(job, None)) is not None:
                self._held[job] = result
                self._held_bytes += _size(result)
                while self._held_bytes > HELD_BYTES and len(self._held) > 1:
                    self._drop(next(iter(self._held)))
            message += self._held.get(job, [])
        if message:
            await self._send(message)

    def _drop(self, job: str) -> None:
        self._jobs.pop(job, None)
        self._unsent.pop(job, None)
        self._held_bytes -= _size(self._held.pop(job, []))

    async def _report(self) -> None:
        busy_s = _busy_s()
        while True:
            liveness().enter("event loop")
            before_s, busy_s = busy_s, _busy_s()
            status = Status(
                self._environment,
                self._number,
                self._incarnation,
                list(self._running),
                self._tasks,
                self._node,
                self._seen,
                busy_s - before_s,
                {job: _size(result) for job, result in chain(self._unsent.items(), self._held.items())},
                self._answers(),
            )
            await self._send([msgspec.msgpack.encode(status)])
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def _run(self, job: Job) -> None:
        # The job stays in the status, as running or held, until its result is queued: the result must reach the
        # orchestrator before a status without the job, which would mean that it is lost.
        try:
            try:
                result = encode_result(job.id, await self._rollout(job))
            except BaseException as error:
                await self._send([msgspec.msgpack.encode(self._failure(job, error))])
            else:
                self._unsent[job.id], size = result, _size(result)
                if size <= SMALL_RESULT:
                    self._small.append(job.id)
                    # Results that are ready now share a message, because a message costs both ends 0.1 ms.
                    await asyncio.sleep(0)
                    jobs, self._small = self._small, []
                    await self._send_results(jobs)
                else:
                    await self._send([msgspec.msgpack.encode(ResultReady(job.id, size))])
        finally:
            self._running.pop(job.id, None)
            if job.id not in self._unsent and job.id not in self._held:
                self._jobs.pop(job.id, None)

    def _failure(self, job: Job, error: BaseException) -> Result:
        # An environment may raise anything: SystemExit, a panic of a Rust library, a CancelledError of its own. Without
        # a result, the job would be dispatched again without limit. Jobs that this worker cancels no longer run.
        was_cancelled = isinstance(error, asyncio.CancelledError) and job.id not in self._running
        if isinstance(error, GeneratorExit) or was_cancelled:
            raise error
        if not isinstance(error, RolloutError):
            log.error("job %s", job.id, exc_info=error)
        cause = error.cause if isinstance(error, RolloutError) else "environment"
        return Result(job.id, error=in_words(error), cause=cause)


def _size(frames: Sequence[Frame]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


def _busy_s() -> float:
    """Return the seconds for which this thread has computed or waited for a CPU, as the kernel counts them."""
    try:
        computed, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        return time.thread_time()
    return (int(computed) + int(waited)) / 1e9

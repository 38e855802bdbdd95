"""The job protocol between the orchestrator and its environment workers: ZMQ ROUTER (pool) and DEALER (worker).

A worker (`JobRunner` is its end; `worker` says how a job runs) reports its Status every second, with the jobs it is
running. The orchestrator (`worker_pool`) compares: a job that the worker does not have is lost and is dispatched anew.
About a job that it does not know it asks (Describe), and goes on with it, or cancels it: those of an orchestrator that
was killed run on meanwhile. A result is sent when the orchestrator asks for it (Send), which has room for so many bytes
at once (`receive_window`): hundreds of rollouts may end at the same time. A worker holds what it has sent until it is
told that nobody wants it any more: a group is on disk only when all of its rollouts are there. So either side may be
killed and restarted at any time; a job that dies with its worker is dispatched anew.

worker -> orchestrator      Status | Ended | Result (followed by the frames of its token sequences) | Claims | Unusable
orchestrator -> worker      Job | Cancel | Describe | Send
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from primeslurm.base.files import LONGEST_SOCKET
from primeslurm.orchestrator.rollouts.message_chunks import cut
from primeslurm.orchestrator.worker.generate_endpoint import AnswerCounts, NoAnswerError
from primeslurm.records.heartbeats import liveness
from primeslurm.wire.batches.rollouts import Frame, Rollout
from primeslurm.wire.decoding import Count, DamagedError, Size, value
from primeslurm.wire.transport import secret

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0
NOTICE_S = 5.0
"""Longest wait for the orchestrator to be there when a worker says why it ends."""
LARGEST_RESULT = 2 << 30
"""Bytes of an array that a worker sends. The largest is that of routed experts: 79 MB for 131,072 tokens of 75 layers
and 8 experts each, 1 GB for a million tokens of 61 layers and two bytes an expert."""
HELD_BYTES = 1 << 30
"""Of results that a worker holds after they were sent; the oldest are given up first, and are sampled anew should the
orchestrator be killed before their group is on disk."""
LARGEST_JOB = 16 << 20
"""Bytes of what a worker is told."""
LONGEST_ERROR = 16384
"""Characters. What programs of a model have printed may be in an error; its beginning and end say what happened."""


Cause = Literal["environment", "prompt", "engine"]
"""Whose fault a failed rollout is. environment: that of the environment, its programs, or what the model said. prompt:
the task's own prompt does not fit into the context window. engine: no engine gave a usable answer."""


class RolloutError(Exception):
    """A rollout cannot be trained on; the message says why."""

    cause: Cause = "environment"


class PromptError(RolloutError):
    """A task's own prompt does not fit into the context window: trying the task again would not help."""

    cause: Cause = "prompt"


class EngineError(RolloutError):
    """No engine gave a usable answer: that says nothing of the task."""

    cause: Cause = "engine"


@dataclass(frozen=True)
class JobFailure:
    """Why a job has no rollout."""

    error: str
    """Type and message."""
    cause: Cause = "environment"


class Job(msgspec.Struct, frozen=True, tag=True):
    """Run one rollout."""

    id: str
    """Unique over all restarts of the orchestrator."""
    group: str
    environment: str
    example: int
    opened_version: int
    router: str
    """Process name of the router of the replica that the rollout stays with."""
    cache_salt: str
    task: int | None = None
    """Index in the taskset, where a curriculum or an evaluation says it; None: what the stream has at `example`."""
    number: int = 0
    """Greater than those of the jobs that were sent before."""
    sender: str = ""
    """Which orchestrator of the attempt has dispatched it, where another may go on with it."""

    @property
    def task_key(self) -> str:
        """Return what the rollouts of one task have in common, also after a restart."""
        return f"{self.environment}-{self.example:08d}" + (f"@{self.task}" if self.task is not None else "")


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop these jobs, and hold none of their results: none is wanted."""

    jobs: list[str]


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Say (Claims) what these jobs are that you report."""

    jobs: list[str]


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send the results of these jobs, which you hold."""

    jobs: list[str]


class Status(msgspec.Struct, frozen=True, tag=True):
    """A worker is alive and runs these jobs."""

    environment: str
    worker: Count
    incarnation: str
    """Greater after a restart of the worker, on whichever node."""
    jobs: list[str]
    tasks: Count | None = None
    """How many the environment has; None: that is unknown, or there is no end of them."""
    node: str = ""
    """The node that it is on: what the bound of rollouts on a node counts by."""
    seen: int = 0
    """Number of the newest job that it was sent: a job up to there that is not in `jobs` is no more."""
    busy_s: float = 0.0
    """Seconds since its last status for which its event loop computed, or waited for a CPU."""
    held: dict[str, Size] = {}
    """Jobs that have ended and whose results are still there, with their bytes."""
    answers: dict[str, AnswerCounts] = {}
    """Usable and damaged answers since the last status, by the address of the engine, or of its router if the engine is
    not known."""


class Claims(msgspec.Struct, frozen=True, tag=True):
    """What jobs are that a worker runs, or whose results it holds: the answer to Describe."""

    jobs: list[Job]


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot begin to serve its environment, and ends."""

    environment: str
    worker: Count
    error: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A job ended, and its result of so many bytes is there. Of one that failed, the Result comes at once."""

    job: str
    size: Size


class Result(msgspec.Struct, frozen=True, tag=True):
    """What a job has come to. `error` is set if the rollout failed; there are no sequences then."""

    job: str
    frames: list[Count] = []
    """How many frames each sequence has."""
    error: str | None = None
    cause: Cause = "environment"
    """Whose fault the error is."""


ToWorker = Job | Cancel | Describe | Send
ToOrchestrator = Status | Ended | Result | Claims | Unusable


def on_this_node(address: str) -> Path | None:
    """Return the Unix socket by which processes of the same node reach who listens at a TCP address.

    It carries 3 times as much as TCP to the same machine, and is in the temporary directory that all processes of a
    node's agent have, and nobody else. None: there is no such way.
    """
    path = Path(tempfile.gettempdir(), f"rollouts-{hashlib.sha256(address.encode()).hexdigest()[:16]}.sock")
    return path if address.startswith("tcp://") and len(os.fsencode(path)) <= LONGEST_SOCKET else None


def nearest(address: str) -> str:
    """Return the address itself, or the socket `on_this_node` if this user's orchestrator has made it."""
    path = on_this_node(address)
    try:
        found = None if path is None else path.lstat()
    except OSError:
        return address
    mine = found is not None and stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid()
    return f"ipc://{path}" if mine else address


def shortened(error: str) -> str:
    """Keep the beginning and the end of an error that is longer than LONGEST_ERROR."""
    half = LONGEST_ERROR // 2
    return error if len(error) <= LONGEST_ERROR else f"{error[:half]} [...] {error[-half:]}"


def in_words(error: BaseException) -> str:
    """Write an error as its type and message, shortened. Half of a surrogate pair, as models write it, is escaped."""
    try:
        message = str(error)
    except Exception:  # of an environment's own class
        message = "it cannot be shown"
    return shortened(f"{type(error).__name__}: {message}").encode(errors="backslashreplace").decode()


def encode_result(job: str, sequences: Sequence[Rollout]) -> list[Frame]:
    """Encode a finished job as wire frames.

    Raises:
        RolloutError: it is larger than the orchestrator takes, which would never hear of it.
    """
    encoded = [sequence.encode() for sequence in sequences]
    largest = max((memoryview(frame).nbytes for frames in encoded for frame in frames), default=0)
    if largest > LARGEST_RESULT:
        raise RolloutError(f"an array of {largest} bytes is more than {LARGEST_RESULT}")
    head = msgspec.msgpack.encode(Result(job, [len(frames) for frames in encoded]))
    return [head, *chain.from_iterable(encoded)]


def decode_sequences(result: Result, frames: Sequence[Any]) -> tuple[Rollout, ...]:
    """Decode the sequences of a Result from the frames that follow it.

    Raises:
        DamagedError: the frames are not as many as the Result says, or damaged, or there are none.
    """
    if len(frames) != sum(result.frames):
        raise DamagedError(f"{len(frames)} frames for sequences of {result.frames[:8]}")
    if not frames:
        raise DamagedError("no sequences")
    ends = accumulate(result.frames)
    return tuple(Rollout.decode(frames[end - count : end]) for end, count in zip(ends, result.frames, strict=True))


def give_notice(environment: str, number: int, address: str, error: BaseException) -> None:
    """Tell the orchestrator that this worker cannot begin to serve its environment, and why."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        secret.present(socket)
        socket.setsockopt(zmq.LINGER, int(NOTICE_S * 1000))
        socket.connect(address)
        socket.send_multipart(cut([msgspec.msgpack.encode(Unusable(environment, number, in_words(error)))]))


class JobRunner:
    """Runs jobs concurrently, as many as it is sent.

    Args:
        environment: label of the environment served.
        number: which of the environment's workers this is.
        address: the orchestrator's ZMQ address.
        rollout: runs one job to its end and returns its token sequences; whatever it raises makes the job a failed one.
        tasks: how many the environment has, if that is known.
        node: the node that it is on.
        answers: returns the answers of engines since it was called last.
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
        self._incarnation = f"{time.time_ns():016x}"  # one that is started where a lost node's clock is wrong waits
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, Job] = {}
        """Those that run, and those whose results are there."""
        self._unsent: dict[str, list[Frame]] = {}
        """Results that nobody has asked for."""
        self._held: dict[str, list[Frame]] = {}
        """Those that were sent, oldest first."""
        self._held_bytes = 0
        self._seen = 0
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        secret.present(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_JOB)
        self._refusals = secret.refusals(self._socket)
        self._socket.connect(nearest(address))

    async def serve(self) -> None:
        """Serve until cancelled.

        Raises:
            SecretError: another run listens at the orchestrator's address. Started again, the worker finds its own
                there, or the run starts again with other ports.
        """
        parts = [asyncio.create_task(part) for part in (self._beat(), self._listen(), secret.refused(self._refusals))]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if parts[-1].done():
                raise secret.SecretError(f"{parts[-1].result()}: another run listens there")
            await asyncio.gather(*(part for part in parts if part.done()))
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            jobs = list(self._jobs.values())
            self._jobs.clear()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            self._socket.disable_monitor()
            self._socket.close()

    async def _listen(self) -> None:
        while True:
            head, *_ = await self._socket.recv_multipart()
            try:
                message: ToWorker = value(head, ToWorker)  # type: ignore[arg-type]  # a union is no type
            except DamagedError as error:
                log.warning("a damaged message of the orchestrator is ignored: %s", error)
                continue
            if isinstance(message, Describe):
                known = [self._known[job] for job in message.jobs if job in self._known]
                await self._say([msgspec.msgpack.encode(Claims(known))])
            elif isinstance(message, Send):
                for job in message.jobs:
                    await self._send(job)
            else:
                self._handle(message)

    async def _say(self, message: Sequence[Frame]) -> None:
        await self._socket.send_multipart(cut(message), copy=False)

    def _handle(self, message: Job | Cancel) -> None:
        if isinstance(message, Cancel):
            for job in message.jobs:
                self._let_go(job)
                if task := self._jobs.pop(job, None):
                    task.cancel()
        elif message.id not in self._known:
            self._seen = max(self._seen, message.number)
            self._known[message.id] = message
            self._jobs[message.id] = asyncio.create_task(self._run(message))

    async def _send(self, job: str) -> None:
        if (result := self._unsent.pop(job, None)) is not None:
            self._hold(job, result)
        if (result := self._held.get(job)) is not None:
            await self._say(result)

    def _hold(self, job: str, result: list[Frame]) -> None:
        self._held[job] = result
        self._held_bytes += _size(result)
        while self._held_bytes > HELD_BYTES and len(self._held) > 1:
            self._let_go(next(iter(self._held)))

    def _let_go(self, job: str) -> None:
        self._known.pop(job, None)
        self._unsent.pop(job, None)
        self._held_bytes -= _size(self._held.pop(job, []))

    async def _beat(self) -> None:
        busy = _busy_s()
        while True:
            liveness().enter("event loop")
            who, jobs = (self._environment, self._number, self._incarnation), list(self._jobs)
            before, busy = busy, _busy_s()
            held = {job: _size(result) for job, result in chain(self._unsent.items(), self._held.items())}
            status = Status(*who, jobs, self._tasks, self._node, self._seen, busy - before, held, self._answers())
            await self._say([msgspec.msgpack.encode(status)])
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def _run(self, job: Job) -> None:
        # The job stays in the status, as one that runs or is held, until its result is queued: the result reaches the
        # orchestrator before its absence.
        try:
            result, whole = await self._outcome(job)
            if whole:
                self._unsent[job.id] = result
                result = [msgspec.msgpack.encode(Ended(job.id, _size(result)))]
            await self._say(result)
        finally:
            self._jobs.pop(job.id, None)
            if job.id not in self._unsent and job.id not in self._held:
                self._known.pop(job.id, None)

    async def _outcome(self, job: Job) -> tuple[list[Frame], bool]:
        """Its result, and whether that is no failure."""
        try:
            return encode_result(job.id, await self._rollout(job)), True
        except BaseException as error:
            # An environment may raise anything: SystemExit, a panic of a Rust library, a CancelledError of its own. A
            # job that ended without a result would be dispatched again without limit. Jobs that this worker cancels
            # are no longer in `_jobs`.
            if isinstance(error, GeneratorExit) or (
                isinstance(error, asyncio.CancelledError) and job.id not in self._jobs
            ):
                raise
            if not isinstance(error, RolloutError):
                log.exception("job %s", job.id)
            failed = Result(job.id, error=in_words(error), cause=_cause(error))
            return [msgspec.msgpack.encode(failed)], False


def _cause(error: BaseException) -> Cause:
    if isinstance(error, NoAnswerError):
        return "engine"
    return error.cause if isinstance(error, RolloutError) else "environment"


def _size(frames: Sequence[Frame]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


def _busy_s() -> float:
    """Seconds for which this thread has computed or waited for a CPU, as the kernel counts them."""
    try:
        computed, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        return time.thread_time()
    return (int(computed) + int(waited)) / 1e9

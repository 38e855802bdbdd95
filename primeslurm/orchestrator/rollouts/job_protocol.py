"""The job protocol between the orchestrator and its environment workers: ZMQ ROUTER (pool) and DEALER (worker).

A worker (`job_runner`) reports its Status every second with the jobs that it runs. The orchestrator (`worker_pool`)
compares it with the jobs that it has sent. A job that the worker does not have is lost and is dispatched again. A job
that the orchestrator does not know was sent by an earlier orchestrator, which was killed: it asks for the job
(Describe), and adopts or cancels it.

A finished job is announced (ResultReady). The orchestrator requests results (SendResults) as its receive window allows,
because hundreds of rollouts may end at once. Small results are sent without a request, and those that end together
share a message. A worker holds a sent result until it is cancelled, because a group is on disk only when all of its
rollouts have arrived. So either side may be killed and restarted at any time.

worker -> orchestrator      Status | ResultReady | Results (frames follow each) | JobDescriptions | Unusable
orchestrator -> worker      Job | Cancel | Describe | SendResults

The tags on the wire are older than the names of some classes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from primeslurm.base.files import LONGEST_SOCKET
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import Count, DamagedError, Size

# Maximum size of an array of a result [bytes]. Routed experts are the largest: 79 MB for 131,072 tokens of 75 layers
# and 8 experts each, 1 GB for a million tokens of 61 layers with two bytes per expert.
LARGEST_RESULT = 2 << 30
LONGEST_ERROR = 16384  # Characters of an error that are kept. An error may contain the output of a model's programs.


# Why a rollout failed. environment: its code, its programs, or the model's answers. prompt: the task's own prompt does
# not fit into the context window. engine: no engine gave a usable answer.
Cause = Literal["environment", "prompt", "engine"]


class RolloutError(Exception):
    """A rollout cannot be trained."""

    cause: Cause = "environment"


class PromptError(RolloutError):
    """A task's own prompt does not fit into the context window, so a retry would not help."""

    cause: Cause = "prompt"


class EngineError(RolloutError):
    """No engine gave a usable answer, which says nothing about the task."""

    cause: Cause = "engine"


@dataclass(frozen=True)
class JobFailure:
    """Why a job has no rollout."""

    error: str  # type and message
    cause: Cause = "environment"


class AnswerCounts(msgspec.Struct):
    """Usable and damaged answers of one engine since the last report."""

    good: Count = 0
    damaged: Count = 0
    tasks: list[str] = []  # some of the tasks whose requests got damaged answers
    error: str = ""  # what was wrong with the last damaged answer


class Job(msgspec.Struct, frozen=True, tag=True):
    """Run one rollout."""

    id: str  # unique over all restarts of the orchestrator
    group: str
    environment: str
    example: int
    opened_version: int
    router: str  # process name of the router of the rollout's replica
    cache_salt: str
    # Index in the taskset, if a curriculum or an evaluation chose it. None: the task at `example` of the stream.
    task: int | None = None
    number: int = 0  # greater than the numbers of all jobs that were sent before
    sender: str = ""  # the orchestrator that dispatched the job, if another one may adopt it

    @property
    def task_key(self) -> str:
        """Return what all rollouts of one task have in common, also after a restart."""
        return f"{self.environment}-{self.example:08d}" + (f"@{self.task}" if self.task is not None else "")


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop these jobs and drop their results."""

    jobs: list[str]


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Answer with JobDescriptions of these jobs."""

    jobs: list[str]


class SendResults(msgspec.Struct, frozen=True, tag="Send"):
    """Answer with the results of these jobs."""

    jobs: list[str]


class Status(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of a worker, with its jobs."""

    environment: str
    worker: Count
    incarnation: str  # greater after each restart of the worker, on any node
    jobs: list[str]
    tasks: Count | None = None  # number of the environment's tasks; None: unknown or unlimited
    node: str = ""  # the worker's node, for the limit of rollouts per node
    seen: int = 0  # Number of the newest job that it received. A job up to this number that is not in `jobs` is lost.
    busy_s: float = 0.0  # seconds since the last status in which the event loop computed or waited for a CPU
    held: dict[str, Size] = {}  # size of each finished job's result [bytes], for results that the worker still has
    # Answers since the last status, by address of the engine, or of its router if the engine is unknown.
    answers: dict[str, AnswerCounts] = {}


class JobDescriptions(msgspec.Struct, frozen=True, tag="Claims"):
    """Jobs that a worker runs, or whose results it holds: the answer to Describe."""

    jobs: list[Job]


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot start its environment, and exits."""

    environment: str
    worker: Count
    error: str


class ResultReady(msgspec.Struct, frozen=True, tag="Ended"):
    """A job succeeded, and its result can be requested. A failed job sends its Result at once."""

    job: str
    size: Size  # size of the result [bytes]


class Result(msgspec.Struct, frozen=True, tag=True):
    """The result of a job. If `error` is set, the rollout failed and has no sequences."""

    job: str
    frames: list[Count] = []  # number of frames of each sequence
    error: str | None = None
    cause: Cause = "environment"


ToWorker = Job | Cancel | Describe | SendResults
ToOrchestrator = Status | ResultReady | Result | JobDescriptions | Unusable


def on_this_node(address: str) -> Path | None:
    """Return the Unix socket that stands for a TCP address on the same node, or None if there cannot be one."""
    # It has three times the bandwidth of TCP. It is in the temporary directory that only processes of one agent share.
    path = Path(tempfile.gettempdir(), f"rollouts-{hashlib.sha256(address.encode()).hexdigest()[:16]}.sock")
    return path if address.startswith("tcp://") and len(os.fsencode(path)) <= LONGEST_SOCKET else None


def nearest(address: str) -> str:
    """Return the address of the socket `on_this_node` if this user's orchestrator has made it, else `address`."""
    path = on_this_node(address)
    try:
        status = None if path is None else path.lstat()
    except OSError:
        return address
    is_ours = status is not None and stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()
    return f"ipc://{path}" if is_ours else address


def shortened(error: str) -> str:
    """Return an error of at most about LONGEST_ERROR characters: its beginning and its end."""
    half = LONGEST_ERROR // 2
    return error if len(error) <= LONGEST_ERROR else f"{error[:half]} [...] {error[-half:]}"


def in_words(error: BaseException) -> str:
    """Return an error's type and message, shortened. Surrogates, which models may write, are escaped."""
    try:
        message = str(error)
    except Exception:  # raised by an environment's own class
        message = "it cannot be shown"
    return shortened(f"{type(error).__name__}: {message}").encode(errors="backslashreplace").decode()


def encode_result(job: str, sequences: Sequence[Rollout]) -> list[Frame]:
    """Encode the result of a job as wire frames. Raise RolloutError if the orchestrator would not take its size."""
    encoded = [sequence.encode() for sequence in sequences]
    largest = max((memoryview(frame).nbytes for frames in encoded for frame in frames), default=0)
    if largest > LARGEST_RESULT:
        raise RolloutError(f"an array of {largest} bytes is more than {LARGEST_RESULT}")
    head = msgspec.msgpack.encode(Result(job, [len(frames) for frames in encoded]))
    return [head, *chain.from_iterable(encoded)]


def decode_sequences(result: Result, frames: Sequence[Any]) -> tuple[Rollout, ...]:
    """Decode the sequences of a Result from the frames after it. Raise DamagedError."""
    if len(frames) != sum(result.frames):
        raise DamagedError(f"{len(frames)} frames for sequences of {result.frames[:8]}")
    if not frames:
        raise DamagedError("no sequences")
    ends = accumulate(result.frames)
    return tuple(Rollout.decode(frames[end - count : end]) for end, count in zip(ends, result.frames, strict=True))

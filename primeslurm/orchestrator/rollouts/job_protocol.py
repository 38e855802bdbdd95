"""The job protocol between the orchestrator and its environment workers: ZMQ ROUTER (pool) and DEALER (worker).

A worker (`job_runner`) reports its Status every second, with the jobs it is running. The orchestrator (`worker_pool`)
compares: a job that it does not know is cancelled, a job that the worker does not have is lost and is dispatched anew.
So either side may be killed and restarted at any time.

worker -> orchestrator      Status | Result (each followed by the frames of its token sequences) | Unusable
orchestrator -> worker      Job | Cancel
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import msgspec

from primeslurm.wire.frames import Frame
from primeslurm.wire.rollouts import Rollout

STATUS_INTERVAL_S = 1.0


class RolloutFailed(Exception):
    """A rollout cannot be trained on; the message says why."""


class Job(msgspec.Struct, frozen=True, tag=True):
    """Run one rollout."""

    id: str
    """Unique over all restarts of the orchestrator."""
    group: str
    environment: str
    example: int
    opened_version: int
    router: str
    """Process name of the router of the replica that the group is pinned to."""
    cache_salt: str
    task: int | None = None
    """Index in the taskset, where a curriculum or an evaluation says it; None: what the stream has at `example`."""
    number: int = 0
    """Greater than those of the jobs that were sent before."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop these jobs; no Result is wanted."""

    jobs: list[str]


class Status(msgspec.Struct, frozen=True, tag=True):
    """A worker is alive and runs these jobs."""

    environment: str
    worker: int
    incarnation: str
    """Greater after a restart of the worker, on whichever node."""
    jobs: list[str]
    tasks: int | None = None
    """How many the environment has; None: that is unknown, or there is no end of them."""
    node: str = ""
    """The node that it is on: what the bound of rollouts on a node counts by."""
    seen: int = 0
    """Number of the newest job that it was sent: a job up to there that is not in `jobs` is no more."""
    busy_s: float = 0.0
    """Seconds since its last status for which its event loop computed, or waited for a CPU."""


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot begin to serve its environment, and ends."""

    environment: str
    worker: int
    error: str


class Result(msgspec.Struct, frozen=True, tag=True):
    """A job ended. `error` is set if the rollout failed; there are no sequences then."""

    job: str
    frames: list[int] = []
    """How many frames each sequence has."""
    error: str | None = None


ToWorker = Job | Cancel
ToOrchestrator = Status | Result | Unusable


def encode_result(job: str, sequences: Sequence[Rollout]) -> list[Frame]:
    """Encode a finished job as wire frames."""
    encoded = [sequence.encode() for sequence in sequences]
    head = msgspec.msgpack.encode(Result(job, [len(frames) for frames in encoded]))
    return [head, *chain.from_iterable(encoded)]


def decode_sequences(result: Result, frames: Sequence[Any]) -> tuple[Rollout, ...]:
    """Decode the sequences of a Result from the frames that follow it.

    Raises:
        ValueError: the frames are not as many as the Result says, or damaged.
    """
    if len(frames) != sum(result.frames):
        raise ValueError(f"{len(frames)} frames for sequences of {result.frames}")
    ends = accumulate(result.frames)
    return tuple(Rollout.decode(frames[end - count : end]) for end, count in zip(ends, result.frames, strict=True))

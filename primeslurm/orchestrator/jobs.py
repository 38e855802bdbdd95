"""What orchestrator and environment workers say to one another: ZMQ ROUTER (orchestrator) and DEALER (worker).

A worker reports its Status every second, with the jobs it is running. The orchestrator compares: a job that it does not
know is cancelled, a job that the worker does not have is lost and is dispatched anew. So either side may be killed and
restarted at any time.

worker -> orchestrator      Status | Result (each followed by the frames of its token sequences)
orchestrator -> worker      Job | Cancel
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from primeslurm.wire.frames import Frame
from primeslurm.wire.rollouts import Rollout

STATUS_INTERVAL_S = 1.0
FRAMES_PER_SEQUENCE = 5
"""A Rollout on the wire: its header and four arrays."""


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


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop these jobs; no Result is wanted."""

    jobs: list[str]


class Status(msgspec.Struct, frozen=True, tag=True):
    """A worker is alive and runs these jobs."""

    environment: str
    worker: int
    incarnation: str
    """Differs after a restart of the worker."""
    jobs: list[str]


class Result(msgspec.Struct, frozen=True, tag=True):
    """A job ended. `error` is set if the rollout failed; there are no sequences then."""

    job: str
    sequences: int = 0
    error: str | None = None


ToWorker = Job | Cancel
ToOrchestrator = Status | Result


def encode_result(job: str, sequences: Sequence[Rollout]) -> list[Frame]:
    """A finished job as wire frames."""
    head = msgspec.msgpack.encode(Result(job, len(sequences)))
    return [head, *(frame for sequence in sequences for frame in sequence.encode())]


def decode_sequences(result: Result, frames: Sequence[Any]) -> tuple[Rollout, ...]:
    """The sequences of a Result from the frames that follow it. Raises ValueError if they do not fit."""
    if len(frames) != result.sequences * FRAMES_PER_SEQUENCE:
        raise ValueError(f"{len(frames)} frames for {result.sequences} sequences")
    starts = range(0, len(frames), FRAMES_PER_SEQUENCE)
    return tuple(Rollout.decode(frames[start : start + FRAMES_PER_SEQUENCE]) for start in starts)

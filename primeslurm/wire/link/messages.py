"""Requests of the trainer and answers of the orchestrator."""

from __future__ import annotations

import msgspec

from primeslurm.wire.batches.batch import RankShard
from primeslurm.wire.decoding import Size
from primeslurm.wire.weight_transfer.messages import NewPolicy, OfferTransfer, SessionState, TransferSession

# Maximum size of a frame of a request [bytes]. The longest request has a step's metrics, some ten kilobytes. A peer
# without the key can make the orchestrator buffer this much, too.
LARGEST_REQUEST = 256 << 10
# Bytes of arrays in one answer. All ranks request their first chunk at once, so all first chunks are in flight.
CHUNK_BYTES = 2 << 20
# Maximum size of a frame of an answer [bytes]: a chunk, or a batch's header, which may contain images.
LARGEST_ANSWER = 1 << 30
# Maximum size of one rank's batch [bytes]. With router replay a batch may have tens of gigabytes.
LARGEST_BATCH = 256 << 30


class GetBatch(msgspec.Struct, frozen=True, tag=True):
    """A rank requests its shard of the batch of `step`, counted from 1."""

    step: int
    shard: RankShard
    # The trainer still works on the step before: form the batch only if nothing is lost by forming it early.
    ahead: bool = False
    offset: Size = 0  # bytes of the arrays that the rank has already
    unreadable: bool = False  # the rank could not read the file that the last answer named, which may be damaged


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The trainer reports that `step` is trained, with its metrics."""

    step: int
    metrics: dict[str, float]


class Save(msgspec.Struct, frozen=True, tag=True):
    """The trainer asks the orchestrator to write its part of the checkpoint of `step` into `directory`."""

    step: int
    directory: str


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The trainer reports that the checkpoint of `step` is committed."""

    step: int


Request = GetBatch | NewPolicy | OfferTransfer | SessionState | StepDone | Save | Committed


class Answer(msgspec.Struct, frozen=True):
    """The orchestrator's answer to a request."""

    # batch (frames follow), file (at `path`), ok, wait (ask again), stop (no more batches), error (see `text`),
    # transfer (engines need the policy before the next batch), session (join it), lost (`text` names the engine).
    kind: str
    text: str = ""
    session: TransferSession | None = None
    version: int | None = None  # answer to NewPolicy: the newest policy that was announced in this attempt
    keep: list[int] = []  # answer to Committed: steps whose checkpoints must be kept
    path: str = ""  # file of the batch

"""Messages about weight transfer between trainer, orchestrator and engines."""

from __future__ import annotations

import msgspec

from primeslurm.wire.decoding import Count


class NewPolicy(msgspec.Struct, frozen=True, tag="Published"):  # records of earlier runs use this tag
    """Policy `version`, made by step `version`, is complete under `path`, or (if empty) the trainer sends it."""

    version: int
    path: str


class OfferTransfer(msgspec.Struct, frozen=True, tag=True):
    """The trainer is ready to send policy `version` as long as it repeats this request."""

    version: int
    store: str  # host:port of the store where senders and receivers meet
    senders: int  # number of trainer ranks
    done: str = ""  # the last session that the trainer has finished or given up


class SessionState(msgspec.Struct, frozen=True, tag=True):
    """A trainer rank asks whether all engines of a session are still alive."""

    session: str
    rank: int  # the asking rank: equal requests are answered once, so each rank's request must differ


class TransferSession(msgspec.Struct, frozen=True):
    """One transfer of a policy. The first `senders` of its `size` ranks send, the others receive."""

    id: str
    senders: int
    size: int


class PolicyDirectory(msgspec.Struct, frozen=True):
    """Weight update from files."""

    version: int
    path: str  # directory as every engine worker sees it
    adapter: bool = False  # whether it holds a LoRA adapter; version 0 has none


class SessionPlace(msgspec.Struct, frozen=True):
    """Weight update by a session with the trainer, and the engine's ranks in that session."""

    version: int
    store: str  # host:port of the trainer's store
    session: str
    senders: int
    size: int
    first_rank: int  # rank of the engine's first worker
    timeout_s: float


UpdateInfo = PolicyDirectory | SessionPlace  # `update_info` of POST /update_weights


class EngineStatus(msgspec.Struct, frozen=True):
    """State of an engine, as its gate reports it at STATUS_PATH."""

    version: Count | None  # policy version that it serves; None during an update, or if none is confirmed
    incarnation: str  # identifies one start of the process
    paused: bool
    updates: int  # Weight updates begun since the start. 0: it holds the weights that it loaded at start.
    initialized: bool  # whether weight transfer is set up

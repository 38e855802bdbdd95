"""What trainer, orchestrator and engines say about weight transfer: over the link, and through an engine's gate."""

from __future__ import annotations

import msgspec

from primeslurm.wire.decoding import Count


class NewPolicy(msgspec.Struct, frozen=True, tag="Published"):  # under this tag it is in records of earlier runs
    """Policy `version` (made by step `version`) is complete under `path`, or (if empty) is sent to who wants it."""

    version: int
    path: str


class OfferTransfer(msgspec.Struct, frozen=True, tag=True):
    """The trainer is ready to send policy `version`, and stays so while it asks.

    `store` (host:port) is where senders and receivers meet, `senders` the number of trainer ranks, `done` the last
    session that they dealt with.
    """

    version: int
    store: str
    senders: int
    done: str = ""


class SessionState(msgspec.Struct, frozen=True, tag=True):
    """A trainer rank has waited for a while in `session`: are all of its engines still there?

    Requests that are equal are answered once: they name the `rank` that asks.
    """

    session: str
    rank: int


class TransferSession(msgspec.Struct, frozen=True):
    """Senders and receivers that meet once, to transfer a policy. Senders are the first `senders` ranks of `size`."""

    id: str
    senders: int
    size: int


class PolicyDirectory(msgspec.Struct, frozen=True):
    """An update by files, as engines are told: where the policy is, and which version it must be."""

    version: int
    path: str
    """As every worker sees it."""


class SessionPlace(msgspec.Struct, frozen=True):
    """An update by a session with the trainer, as engines are told, and the place of an engine's workers in it."""

    version: int
    store: str
    """host:port of the trainer's store."""
    session: str
    senders: int
    size: int
    first_rank: int
    """Rank of the engine's first worker."""
    timeout_s: float


UpdateInfo = PolicyDirectory | SessionPlace
"""`update_info` of POST /update_weights."""


class EngineStatus(msgspec.Struct, frozen=True):
    """What the gate in front of an engine reports (GET STATUS_PATH)."""

    version: Count | None
    """Policy version it serves; None if none is confirmed, or during an update."""
    incarnation: str
    """Differs for every start of the process."""
    paused: bool
    updates: int
    """Updates begun since the start; 0 = it holds the weights that it loaded at start."""
    initialized: bool
    """Whether the weight transfer is set up."""

"""What trainer and orchestrator say about weight transfer, over `wire.link`."""

from __future__ import annotations

import msgspec


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


class TransferSession(msgspec.Struct, frozen=True):
    """Senders and receivers that meet once, to transfer a policy. Senders are the first `senders` ranks of `size`."""

    id: str
    senders: int
    size: int

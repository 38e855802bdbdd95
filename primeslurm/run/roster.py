"""Which node of the allocation plays which node of the Plan: `roster.json`, written by the head."""

from __future__ import annotations

import msgspec


class Seat(msgspec.Struct, frozen=True):
    """The agent that plays one node of the Plan."""

    rank: int
    name: str
    """The node's name as Slurm knows it."""


class Roster(msgspec.Struct, frozen=True):
    """`roster.json`. A new generation is written whenever a node is replaced."""

    generation: int
    seats: dict[int, Seat]
    """By index of the Plan's node."""

    def node_of(self, rank: int) -> int | None:
        """The Plan's node that an agent plays, or None: it is a spare, or was replaced."""
        return next((node for node, seat in self.seats.items() if seat.rank == rank), None)

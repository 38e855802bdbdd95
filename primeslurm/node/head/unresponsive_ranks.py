"""Who is silent, and which trainer ranks the others wait for. Pure.

Ranks that wait in a collective are as silent as the one that they wait for. They have begun that collective, it has
not: whoever has begun the fewest is behind. One that stands still in the midst of a collective has begun as many as
the others: if a signal has stopped it, that tells. While any of them beats, all go on, or wait for what that one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from primeslurm.records.events.processes import RanksUnresponsive
from primeslurm.records.fleet import HeartbeatReport


@dataclass(frozen=True)
class Patience:
    """How long a process may be silent before that is worth a word."""

    shown_s: float = 5.0
    """Never less than this."""
    share: float = 1 / 60
    """Nor less than this share of what a phase may take."""
    ranks_share: float = 1 / 12
    """The same for the ranks of a trainer, which compute for a while between two beats."""
    start_share: float = 1 / 2
    """And for what has yet to begin: it imports and loads."""

    def is_over(self, heartbeat: HeartbeatReport, *, rank: bool = False) -> bool:
        """Whether somebody has been silent for long enough to say so.

        Args:
            beat: what is known of the process.
            rank: it is one of a trainer's.
        """
        share = (self.ranks_share if rank else self.share) if heartbeat.number else self.start_share
        return bool(heartbeat.limit_s) and heartbeat.silent_s > max(self.shown_s, heartbeat.limit_s * share)


PATIENCE = Patience()


@dataclass(frozen=True)
class UnresponsiveRanks:
    """All ranks of a trainer are silent."""

    behind: tuple[str, ...]
    """Those that the others wait for; all of them if nobody is behind."""
    waiting: int
    heartbeat: HeartbeatReport
    """Of the one of these that was heard of last."""

    @property
    def hangs(self) -> bool:
        """Whether it has lasted for too long."""
        return bool(self.heartbeat.limit_s) and self.heartbeat.silent_s > self.heartbeat.limit_s

    @property
    def reason(self) -> str:
        """Why those behind are ended."""
        if self.waiting:
            return f"hangs: {self.beat.words}; {self.waiting} ranks wait for it"
        alone = len(self.behind) == 1
        return f"hangs: {self.beat.words}" + ("" if alone else "; all ranks are, and none is behind the others")

    def event(self) -> RanksUnresponsive:
        """For the journal."""
        heartbeat = self.heartbeat
        return RanksUnresponsive(
            list(self.behind), self.waiting, heartbeat.phase, heartbeat.step, round(heartbeat.silent_s, 1)
        )


def unresponsive_ranks(
    heartbeats: Mapping[str, HeartbeatReport], patience: Patience = PATIENCE
) -> UnresponsiveRanks | None:
    """Find out who keeps the ranks of a trainer from going on.

    Args:
        beats: of all ranks, by name.
        patience: with them.

    Returns:
        None while any of them goes on.
    """
    if not heartbeats or not all(patience.is_over(heartbeat, rank=True) for heartbeat in heartbeats.values()):
        return None
    least = min(heartbeat.collectives for heartbeat in heartbeats.values())
    fewest = [name for name, heartbeat in heartbeats.items() if heartbeat.collectives == least]
    behind = tuple([name for name in fewest if heartbeats[name].stopped] or fewest)
    last = min((heartbeats[name] for name in behind), key=lambda heartbeat: heartbeat.silent_s)
    return UnresponsiveRanks(behind, len(heartbeats) - len(behind), last)

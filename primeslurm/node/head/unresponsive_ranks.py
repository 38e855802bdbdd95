"""Finds the trainer ranks that keep all others waiting. Pure.

Ranks that wait in a collective send no heartbeats, just as the rank that they wait for. Each rank counts the
collectives that it has begun, so the rank with the lowest count is the one that the others wait for. A rank that stops
within a collective has the same count; then only a stop signal identifies it. As long as any rank sends heartbeats,
either all make progress, or the others wait for that rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from primeslurm.records.events.processes import RanksUnresponsive
from primeslurm.records.fleet import HeartbeatReport


@dataclass(frozen=True)
class QuietThresholds:
    """Thresholds of a heartbeat's age. An older one is reported as quiet, long before the process is unresponsive."""

    shown_s: float = 5.0  # lower bound [s]
    share: float = 1 / 60  # fraction of the timeout, for most processes
    ranks_share: float = 1 / 12  # for trainer ranks, which compute for a while between two heartbeats
    start_share: float = 1 / 2  # before the first heartbeat, while the process imports and loads

    def exceeded(self, heartbeat: HeartbeatReport, *, rank: bool = False) -> bool:
        """Return whether a process is quiet. `rank`: it is a trainer rank."""
        share = (self.ranks_share if rank else self.share) if heartbeat.number else self.start_share
        return bool(heartbeat.limit_s) and heartbeat.silent_s > max(self.shown_s, heartbeat.limit_s * share)


THRESHOLDS = QuietThresholds()


@dataclass(frozen=True)
class UnresponsiveRanks:
    """A state in which no trainer rank sends heartbeats."""

    behind: tuple[str, ...]  # ranks that the others wait for; all ranks if none is behind
    waiting: int  # ranks that wait
    heartbeat: HeartbeatReport  # the newest heartbeat of the ranks behind

    @property
    def timed_out(self) -> bool:
        return bool(self.heartbeat.limit_s) and self.heartbeat.silent_s > self.heartbeat.limit_s

    @property
    def reason(self) -> str:
        text = f"unresponsive: {self.heartbeat.text}"
        if self.waiting:
            return f"{text}; {self.waiting} ranks wait for it"
        return text if len(self.behind) == 1 else f"{text}; all ranks are, and none is behind the others"

    def event(self) -> RanksUnresponsive:
        last = self.heartbeat
        return RanksUnresponsive(list(self.behind), self.waiting, last.phase, last.step, round(last.silent_s, 1))


def unresponsive_ranks(
    heartbeats: Mapping[str, HeartbeatReport], thresholds: QuietThresholds = THRESHOLDS
) -> UnresponsiveRanks | None:
    """Return the ranks that the others wait for; None while any rank sends heartbeats.

    `heartbeats` has the newest heartbeat of every trainer rank, by name.
    """
    if not heartbeats or not all(thresholds.exceeded(each, rank=True) for each in heartbeats.values()):
        return None
    least = min(each.collectives for each in heartbeats.values())
    fewest = [name for name, each in heartbeats.items() if each.collectives == least]
    behind = tuple([name for name in fewest if heartbeats[name].stopped] or fewest)
    newest = min((heartbeats[name] for name in behind), key=lambda each: each.silent_s)
    return UnresponsiveRanks(behind, len(heartbeats) - len(behind), newest)

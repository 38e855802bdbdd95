"""How the processes of one node are: which are silent, for how long, where they were last, and what keeps them.

A process says that it goes on by beats of its main loop (`records.beats`), or by answering its probe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from primeslurm.base.unresponsive_timer import UnresponsiveTimer
from primeslurm.node.agent.health_probe import HealthProbe
from primeslurm.node.host.process_condition import Condition, condition_of
from primeslurm.plan.model import Process
from primeslurm.records.fleet import HeartbeatReport
from primeslurm.records.heartbeats import Heartbeat, HeartbeatPage

STOPPED_S = 10.0
"""A process that is silent for so long and was stopped by a signal is continued: nothing else does that. Whoever wants
to look at one stops it with a debugger, and that is left alone."""
QUIET_S = 2.0
"""What has just been heard of is in no condition that would matter."""
AGAIN_S = 1.0
"""Between two looks into /proc at what stays silent: ranks that wait for rollouts are silent for minutes."""


_NOTHING = Heartbeat()


@dataclass(frozen=True)
class Liveness:
    """How one process was at the last look."""

    silent_s: float = 0.0
    limit_s: float | None = None
    """It hangs if it is silent for longer; None: nobody knows."""
    heartbeat: Heartbeat = _NOTHING
    stopped: bool = False
    """By a signal."""

    @property
    def hangs(self) -> bool:
        """Whether it has been silent for too long."""
        return self.limit_s is not None and self.silent_s > self.limit_s

    def report(self) -> HeartbeatReport:
        """For the heartbeat."""
        heartbeat, limit_s = self.heartbeat, self.limit_s or 0.0
        silent_s = round(self.silent_s, 1)
        return HeartbeatReport(
            heartbeat.phase, heartbeat.step, heartbeat.number, heartbeat.collectives, silent_s, limit_s, self.stopped
        )


@dataclass
class _Watched:
    process: Process
    pid: int
    page: HeartbeatPage | None
    probe: HealthProbe | None
    silence: UnresponsiveTimer = field(default_factory=UnresponsiveTimer)
    liveness: Liveness = Liveness()
    looked_at: float = 0.0
    waited_s: float | None = None
    """For a CPU, at the last look; None: its condition was not looked at then."""


class LivenessMonitor:
    """Looks after processes from their start to their end.

    Args:
        condition: of a process, by its id.
    """

    def __init__(self, condition: Callable[[int], Condition] = condition_of) -> None:
        self._condition = condition
        self._watched: dict[str, _Watched] = {}

    def started(self, process: Process, pid: int, page: HeartbeatPage | None, probe: HealthProbe | None) -> None:
        """Begin to look after a process."""
        self._watched[process.name] = _Watched(process, pid, page, probe)

    def ended(self, name: str) -> int:
        """Stop looking after a process; returns how many beats its main loop has made."""
        watched = self._watched.pop(name, None)
        if watched is None or watched.page is None:
            return 0
        heartbeats = watched.page.read().number
        watched.page.close()
        return heartbeats

    def of(self, name: str) -> Liveness:
        """Return how a process was at the last look."""
        return self._watched[name].liveness if name in self._watched else Liveness()

    def look(self, now: float) -> None:
        """Look at all of them."""
        for watched in self._watched.values():
            if watched.page is not None or watched.probe is not None:
                watched.liveness = self._look(watched, now)

    def _look(self, watched: _Watched, now: float) -> Liveness:
        heartbeat = _answers(watched.probe) if watched.probe else watched.page.read() if watched.page else _NOTHING
        still = watched.silence.seconds >= QUIET_S and heartbeat.number == watched.liveness.heartbeat.number
        if still and 0.0 <= now - watched.looked_at < AGAIN_S:
            return watched.liveness
        condition, excused_s = Condition(), 0.0
        if watched.silence.seconds >= QUIET_S:  # /proc is read of few: most have just been heard of
            condition = self._condition(watched.pid)
            excused_s = _excused_s(watched, condition, now)
            watched.waited_s = condition.waited_s
        else:
            watched.waited_s = None
        watched.looked_at = now
        silent_s = watched.silence.look(now, heartbeat.number, excused_s)
        return Liveness(silent_s, _limit_s(watched, heartbeat), heartbeat, condition.stopped)


def _answers(probe: HealthProbe) -> Heartbeat:
    return Heartbeat(probe.answers, "of the core behind its server" if probe.behind else "")


def _excused_s(watched: _Watched, condition: Condition, now: float) -> float:
    """For how long since the last look it could do nothing."""
    if condition.held:
        return now - watched.looked_at
    return 0.0 if watched.waited_s is None else condition.waited_s - watched.waited_s


def _limit_s(watched: _Watched, heartbeat: Heartbeat) -> float | None:
    health, heartbeats = watched.process.health, watched.process.heartbeats
    if watched.probe is not None and health is not None:
        return health.hang_timeout_s if heartbeat.number else None  # until it listens, its start has a limit of its own
    if heartbeats is None:
        return None
    return heartbeat.limit_s or (heartbeats.hang_timeout_s if heartbeat.number else heartbeats.start_timeout_s)

"""Liveness of the processes of one node: the age of each process's last heartbeat, and its timeout.

A process shows that it runs by heartbeats of its main loop (`records.heartbeats`), or by answers to its health probe.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from primeslurm.base.unresponsive_timer import UnresponsiveTimer
from primeslurm.node.agent.health_probe import HealthProbe
from primeslurm.plan.model import Process
from primeslurm.records.fleet import HeartbeatReport
from primeslurm.records.heartbeats import Heartbeat, HeartbeatPage

NS_PER_S = 1e9
_STOPPED, _DISK = "T", "D"


class Condition(NamedTuple):
    """Condition of a process and its children."""

    stopped: bool = False  # by a signal (SIGSTOP)
    held: bool = False  # by a debugger, or in an uninterruptible system call: a disk, a file system, a driver
    waited_s: float = 0.0  # total time that the main threads could run but had no CPU


def condition_of(pid: int, proc: Path = Path("/proc")) -> Condition:
    """Return the condition of a process and of its descendants in the same process group, combined.

    For example, an engine's server waits for its engine core, which is a child process.
    """
    conditions = [_condition(proc / str(each)) for each in _family(pid, proc)]
    return Condition(
        any(c.stopped for c in conditions), any(c.held for c in conditions), sum(c.waited_s for c in conditions)
    )


def _condition(directory: Path) -> Condition:
    try:
        lines = (directory / "status").read_text(errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        state, tracer = fields["State"].split()[0], int(fields["TracerPid"])
    except (OSError, ValueError, KeyError, IndexError):  # the process has ended
        return Condition()
    return Condition(state == _STOPPED, tracer != 0 or state == _DISK, _waited_s(directory / "schedstat"))


def _family(pid: int, proc: Path) -> Iterator[int]:
    yield pid
    for child in _children(proc / str(pid)):
        if _group(child) == _group(pid):
            yield from _family(child, proc)


def _children(directory: Path) -> list[int]:
    try:
        tasks = list((directory / "task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # the process has ended, or the kernel lists no children (CONFIG_PROC_CHILDREN)
        return []


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _waited_s(path: Path) -> float:
    try:
        return int(path.read_text().split()[1]) / NS_PER_S
    except (OSError, ValueError, IndexError):  # the kernel does not count it
        return 0.0


# A process that a signal has stopped is continued after this long. People stop processes with a debugger instead.
STOPPED_S = 10.0
QUIET_S = 2.0  # with a younger heartbeat, the condition of a process is not looked up in /proc
# Period of look-ups of a process without heartbeats: a rank that waits for rollouts sends none for minutes.
LOOKUP_PERIOD_S = 1.0

_NONE = Heartbeat()


@dataclass(frozen=True)
class Liveness:
    """Liveness of one process at the last check."""

    silent_s: float = 0.0  # age of the last heartbeat, without time in which the process could not run
    limit_s: float | None = None  # timeout; None: none known
    heartbeat: Heartbeat = _NONE
    stopped: bool = False  # by a signal

    @property
    def unresponsive(self) -> bool:
        return self.limit_s is not None and self.silent_s > self.limit_s

    def report(self) -> HeartbeatReport:
        last, limit_s, silent_s = self.heartbeat, self.limit_s or 0.0, round(self.silent_s, 1)
        return HeartbeatReport(last.phase, last.step, last.number, last.collectives, silent_s, limit_s, self.stopped)


@dataclass
class _Watched:
    process: Process
    pid: int
    page: HeartbeatPage | None
    probe: HealthProbe | None
    timer: UnresponsiveTimer = field(default_factory=UnresponsiveTimer)
    liveness: Liveness = Liveness()
    checked_at: float = 0.0
    cpu_wait_s: float | None = None  # time without a CPU so far, at the last check; None: not looked up then


class LivenessMonitor:
    """Watches processes from start to end. `condition` looks up a process by id."""

    def __init__(self, condition: Callable[[int], Condition] = condition_of) -> None:
        self._condition = condition
        self._watched: dict[str, _Watched] = {}

    def started(self, process: Process, pid: int, page: HeartbeatPage | None, probe: HealthProbe | None) -> None:
        self._watched[process.name] = _Watched(process, pid, page, probe)

    def ended(self, name: str) -> int:
        """Stop watching a process. Return how many heartbeats its main loop has sent."""
        watched = self._watched.pop(name, None)
        if watched is None or watched.page is None:
            return 0
        heartbeats = watched.page.read().number
        watched.page.close()
        return heartbeats

    def of(self, name: str) -> Liveness:
        return self._watched[name].liveness if name in self._watched else Liveness()

    def check(self, now: float) -> None:
        """Read the heartbeats of all processes. `now`: monotonic clock [s]."""
        for watched in self._watched.values():
            if watched.page is not None or watched.probe is not None:
                watched.liveness = self._check(watched, now)

    def _check(self, watched: _Watched, now: float) -> Liveness:
        last = _newest(watched)
        quiet = watched.timer.seconds >= QUIET_S
        unchanged = last.number == watched.liveness.heartbeat.number
        if quiet and unchanged and 0.0 <= now - watched.checked_at < LOOKUP_PERIOD_S:
            return watched.liveness
        # Reading /proc costs more than reading a heartbeat, so only quiet processes are looked up.
        condition, excused_s, cpu_wait_s = Condition(), 0.0, None
        if quiet:
            condition = self._condition(watched.pid)
            cpu_wait_s = condition.waited_s
            if condition.held:
                excused_s = now - watched.checked_at
            elif watched.cpu_wait_s is not None:
                excused_s = cpu_wait_s - watched.cpu_wait_s
        watched.cpu_wait_s, watched.checked_at = cpu_wait_s, now
        silent_s = watched.timer.look(now, last.number, excused_s)
        return Liveness(silent_s, _timeout_s(watched, last), last, condition.stopped)


def _newest(watched: _Watched) -> Heartbeat:
    if watched.probe:
        phase = "of the core behind its server" if watched.probe.core_unresponsive else ""
        return Heartbeat(watched.probe.answers, phase)
    return watched.page.read() if watched.page else _NONE


def _timeout_s(watched: _Watched, last: Heartbeat) -> float | None:
    health, limits = watched.process.health, watched.process.heartbeats
    if watched.probe is not None and health is not None:
        # Before the first answer, the start timeout of the health check applies instead.
        return health.hang_timeout_s if last.number else None
    if limits is None:
        return None
    return last.limit_s or (limits.hang_timeout_s if last.number else limits.start_timeout_s)

"""Decides what to do about one tenant. Pure: files, processes and the clock are in `host_process`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from primeslurm.base.units import size
from primeslurm.run.tenants import Wanted

# Wait before the next start after a failure [s]. It doubles with each failure without a new checkpoint.
BACKOFF_S, MAX_BACKOFF_S = 15.0, 900.0
# Longest time for a start [s]. It loads the recipe and the metadata of the model, and makes the run directory.
START_S = 300.0
# Time for a run to end with a last checkpoint [s]. Its processes are then told to end without one.
STOP_S = 390.0
# A tenant that was paused for its disk quota continues when it uses at most this share of it. Otherwise it would be
# paused again by its first files.
CONTINUE_SHARE = 0.95

Action = Literal["nothing", "start", "end_starter", "stop", "end"]
StarterState = Literal["none", "running", "succeeded", "failed"]
State = Literal["waiting", "starting", "running", "stopping", "back-off", "paused", "completed", "removed"]


@dataclass(frozen=True)
class DiskUse:
    """Disk use and quota of a tenant [bytes]. A quota of None: no limit."""

    used: int = 0
    quota: float | None = None


@dataclass(frozen=True)
class View:
    """A tenant as the host sees it."""

    wanted: Wanted
    wanted_since: float  # time of the user's last command; only compared with other times of commands
    active: bool = False  # its run has processes on this machine
    current: bool = True  # these processes know the present addresses of the deployment
    completed: bool = False  # all its steps are done
    committed: int = 0  # newest step with a checkpoint
    reason: str = ""  # why its last attempt ended
    starter: StarterState = "none"
    """The process that starts its run."""
    disk: DiskUse | None = DiskUse()
    """None: not measured yet."""


@dataclass
class TenantSupervisor:
    """State of one tenant. `decide` returns the next action."""

    state: State = "waiting"
    reason: str = ""
    failures: int = 0  # consecutive ends without a new checkpoint
    since: float = 0.0  # begin of the state
    _committed: int = field(default=0, repr=False)  # newest checkpoint at the last start
    _over_quota: bool = field(default=False, repr=False)  # it is paused for its disk quota
    _command: float = field(default=0.0, repr=False)  # time of the command that was obeyed last

    def decide(self, view: View, now: float, *, admitted: bool = True, ending: bool = False) -> Action:
        """Return the next action towards the state that the last command asks for.

        Args:
            now: monotonic clock [s].
            admitted: the deployment has a place for this tenant.
            ending: the deployment ends, so that every tenant must stop.
        """
        new_command = view.wanted_since > self._command
        self._command = max(self._command, view.wanted_since)
        self._over_quota &= not new_command
        obstacle = ""
        if view.wanted == "running":
            obstacle = self._disk_obstacle(view) if admitted else "the deployment is full"
        wants = view.wanted == "running" and not obstacle and not ending
        if view.starter == "running":
            late = now - self.since > START_S or not wants
            return "end_starter" if self.state == "starting" and late else "nothing"
        if self.state == "starting" and view.starter == "failed" and not view.active:
            self._fail(view, now)
        if view.active:
            return self._watch(view, now, wants=wants, obstacle=obstacle)
        if not wants:
            rest: State = "waiting" if view.wanted == "running" else view.wanted
            if view.wanted == "running" and self._over_quota:
                rest = "paused"
            self._become("completed" if view.completed and view.wanted == "running" else rest, now)
            self.reason = obstacle
            return "nothing"
        if view.completed:
            self._become("completed", now)
            return "nothing"
        if self.state in ("running", "starting"):
            self._fail(view, now)
        wait = min(BACKOFF_S * 2 ** (self.failures - 1), MAX_BACKOFF_S)
        if self.state == "back-off" and now - self.since < wait and not new_command:
            return "nothing"
        if self.state != "back-off":
            self.reason = ""
        self._committed = view.committed
        self._become("starting", now)
        return "start"

    def _disk_obstacle(self, view: View) -> str:
        """Return why a tenant must not run with its disk use, or "" if it may."""
        disk = view.disk
        if disk is None:
            return "" if view.active else "its disk use is not measured yet"
        if disk.quota is None:
            self._over_quota = False
            return ""
        continues = CONTINUE_SHARE * disk.quota
        self._over_quota = disk.used > (continues if self._over_quota else disk.quota)
        if not self._over_quota:
            return ""
        use = f"its files use {size(disk.used)} of {size(disk.quota)} (disk_gb)"
        return f"{use}; it continues below {size(continues)}, or after `tenant resume --disk-gb`"

    def _watch(self, view: View, now: float, *, wants: bool, obstacle: str) -> Action:
        if wants and view.current and self.state != "stopping":
            if view.committed > self._committed:
                self.failures, self.reason = 0, ""
            self._become("running", now)
            return "nothing"
        if self.state != "stopping":
            self.reason = obstacle or self.reason
            self._become("stopping", now)
            return "stop"
        if now - self.since > STOP_S:
            self._become("stopping", now, again=True)
            return "end"
        return "nothing"

    def _fail(self, view: View, now: float) -> None:
        self.failures = 1 if view.committed > self._committed else self.failures + 1
        self.reason = view.reason
        self._become("back-off", now)

    def _become(self, state: State, now: float, *, again: bool = False) -> None:
        if state != self.state or again:
            self.state, self.since = state, now

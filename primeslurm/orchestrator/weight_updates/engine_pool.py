"""State of all engines relative to the wanted policy version. Observations go in, decisions come out, without I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.orchestrator.weight_updates.polling import UNRESPONSIVE_S
from primeslurm.records.state import EngineRecord
from primeslurm.wire.weight_transfer.messages import EngineStatus

EngineState = Literal["DOWN", "STALE", "UPDATING", "CURRENT"]


@dataclass
class EngineView:
    """State of one engine."""

    state: EngineState = "DOWN"
    since: float = 0.0  # time at which it entered this state
    version: int | None = None  # policy version that it serves; None: it serves nothing
    incarnation: str | None = None
    condemned: str | None = None  # incarnation that has to be restarted
    error: str | None = None
    down_because: str = ""
    answered: float = 0.0  # time of its last answer, or at which it was found to be down
    unanswered: int = 0  # polls since then


class EnginePool:
    """All engines of a run."""

    def __init__(
        self, names: Iterable[str], clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall = clock, wall
        self._views = {name: EngineView(since=wall(), answered=clock()) for name in names}
        self.wanted: PolicyVersion | None = None
        # Newest version that every serving engine has acknowledged. It never decreases.
        self.current_version: int | None = None

    def want(self, policy: PolicyVersion) -> None:
        """Set the wanted policy. Raise ValueError if it is older than the wanted one."""
        if self.wanted is not None and policy.version < self.wanted.version:
            raise ValueError(f"policy {policy.version} is older than the wanted {self.wanted.version}")
        self.wanted = policy
        for view in self._views.values():
            if view.state == "CURRENT" and view.version != policy.version:
                self._enter(view, "STALE")

    def seen(self, name: str, status: EngineStatus | None, why: str = "") -> None:
        """Record an engine's status, or (None) that it is down, and why."""
        view = self._views[name]
        view.answered, view.unanswered = self._clock(), 0
        view.down_because = why if status is None else ""
        if status is None:
            view.version = None
            self._enter(view, "DOWN")
        else:
            if status.incarnation != view.incarnation:
                view.incarnation, view.error = status.incarnation, None
            view.version = status.version
            current = self.wanted is not None and status.version == self.wanted.version and not status.paused
            self._enter(view, "CURRENT" if current else "STALE")
        self._advance()

    def missed(self, name: str, why: str) -> bool:
        """Record that an engine did not answer in time. It is down after UNRESPONSIVE_S and at least two polls.

        Return whether this is the first missing answer since its last answer.
        """
        view = self._views[name]
        view.unanswered += 1
        unanswered_s = self._clock() - view.answered
        if view.state != "DOWN" and view.unanswered > 1 and unanswered_s >= UNRESPONSIVE_S:
            view.version, view.down_because = None, f"no answer for {unanswered_s:.0f} s: {why}"
            self._enter(view, "DOWN")
            self._advance()
        return view.unanswered == 1

    def delayed(self, seconds: float) -> None:
        for view in self._views.values():
            view.answered += seconds

    @property
    def unresponsive(self) -> int:
        """Return the number of engines that did not answer their last poll."""
        return sum(view.unanswered > 0 for view in self._views.values())

    def state(self, name: str) -> EngineState:
        return self._views[name].state

    def down_because(self, name: str) -> str:
        """Return why an engine is down. Empty if it is not, or has never been up."""
        return self._views[name].down_because

    def updating(self, name: str) -> None:
        self._enter(self._views[name], "UPDATING")

    def updated(self, name: str, version: int) -> None:
        view = self._views[name]
        view.version, view.error, view.down_because = version, None, ""
        view.answered, view.unanswered = self._clock(), 0
        current = self.wanted is not None and version == self.wanted.version
        self._enter(view, "CURRENT" if current else "STALE")
        self._advance()

    def update_pending(self, name: str) -> None:
        """Record that an update was not started or not completed, and is to be repeated."""
        self._enter(self._views[name], "STALE")

    def failed(self, name: str, error: str, *, serves: bool = False) -> None:
        """Record that an engine has to be restarted. `serves`: it serves its old version until then."""
        view = self._views[name]
        view.condemned, view.error = view.incarnation, error
        if not serves:
            view.version = None
        self._enter(view, "STALE")
        self._advance()

    def ended(self, name: str) -> None:
        self._views[name].version = None
        self._advance()

    def needs_update(self, name: str) -> bool:
        """Return whether an engine is up, need not be restarted, and does not serve the wanted policy."""
        return self.wanted is not None and self._views[name].state == "STALE" and not self.must_restart(name)

    def needs_weights(self, name: str) -> bool:
        """Return whether an engine holds another policy than the wanted one, or none."""
        return self.wanted is not None and self._views[name].version != self.wanted.version

    def wanting(self) -> int:
        """Return the number of engines that need an update or are being updated."""
        return sum(view.state == "UPDATING" or self.needs_update(name) for name, view in self._views.items())

    def must_restart(self, name: str) -> bool:
        """Return whether an engine is up and has to be restarted."""
        view = self._views[name]
        return view.state != "DOWN" and view.condemned is not None and view.condemned == view.incarnation

    def report(self) -> dict[str, EngineRecord]:
        return {
            name: EngineRecord(
                view.state, view.since, view.version, self.must_restart(name), view.error or view.down_because or None
            )
            for name, view in self._views.items()
        }

    def _enter(self, view: EngineView, state: EngineState) -> None:
        if view.state != state:
            view.state, view.since = state, self._wall()

    def _advance(self) -> None:
        serving = [view.version for view in self._views.values() if view.version is not None]
        if serving:
            self.current_version = max(min(serving), -1 if self.current_version is None else self.current_version)

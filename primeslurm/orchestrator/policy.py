"""The policy loop: every engine is brought, and kept, at the wanted policy version.

It is level-triggered: it compares what each engine reports with what is wanted, and does what differs. So a new
policy, an engine that was restarted, and a run that was resumed are one and the same case to it.
`Fleet` decides and does no I/O; `PolicyLoop` asks and acts, one task per engine, so that no engine waits for another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from primeslurm.orchestrator.delivery import NoSenderError
from primeslurm.orchestrator.engines import (
    EngineClient,
    EngineDownError,
    EngineStatus,
    EngineUpdateError,
    Policy,
    Step,
)
from primeslurm.records.events.policy import (
    EngineGivenUp,
    EngineLost,
    EngineRestarted,
    EngineStateChanged,
    EngineUpdated,
    EngineUpdateFailed,
    PolicyCurrent,
    PolicyWanted,
)
from primeslurm.records.journal import Journal
from primeslurm.records.state import EngineRecord

EngineState = Literal["DOWN", "STALE", "UPDATING", "CURRENT"]
Hook = Callable[[int], Awaitable[None]]


@dataclass
class EngineView:
    """What is known of one engine."""

    state: EngineState = "DOWN"
    since: float = 0.0
    """When it entered this state."""
    version: int | None = None
    """Policy version it serves; None while it serves nothing."""
    incarnation: str | None = None
    condemned: str | None = None
    """Incarnation that failed an update and has to be restarted."""
    error: str | None = None


class Fleet:
    """All engines against the wanted policy. Pure: observations go in, decisions come out."""

    def __init__(self, names: Iterable[str], clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._views = {name: EngineView(since=clock()) for name in names}
        self.wanted: Policy | None = None
        self.current_version: int | None = None
        """Newest version that every serving engine has acknowledged. Never falls."""

    def want(self, policy: Policy) -> None:
        """Make `policy` the wanted one. Raises ValueError for a version older than the wanted one."""
        if self.wanted is not None and policy.version < self.wanted.version:
            raise ValueError(f"policy {policy.version} is older than the wanted {self.wanted.version}")
        self.wanted = policy
        for view in self._views.values():
            if view.state == "CURRENT" and view.version != policy.version:
                self._enter(view, "STALE")

    def seen(self, name: str, status: EngineStatus | None) -> None:
        """An engine answered, or (None) did not."""
        view = self._views[name]
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

    def updating(self, name: str) -> None:
        """An update of the engine begins. It still counts as serving its old version."""
        self._enter(self._views[name], "UPDATING")

    def updated(self, name: str, version: int) -> None:
        """The engine acknowledged `version`."""
        view = self._views[name]
        view.version, view.error = version, None
        current = self.wanted is not None and version == self.wanted.version
        self._enter(view, "CURRENT" if current else "STALE")
        self._advance()

    def failed(self, name: str, error: str) -> None:
        """The engine could not take the policy: this incarnation of it is condemned."""
        view = self._views[name]
        view.condemned, view.error, view.version = view.incarnation, error, None
        self._enter(view, "STALE")
        self._advance()

    def needs_update(self, name: str) -> bool:
        """Whether the engine is up, sound and not at the wanted policy."""
        return self.wanted is not None and self._views[name].state == "STALE" and not self.must_restart(name)

    def needs_weights(self, name: str) -> bool:
        """Whether the engine holds another policy than the wanted one, or none."""
        return self.wanted is not None and self._views[name].version != self.wanted.version

    def wanting(self) -> int:
        """How many engines are up and not at the wanted policy, or on their way to it."""
        return sum(view.state == "UPDATING" or self.needs_update(name) for name, view in self._views.items())

    def held(self, name: str) -> None:
        """An update of the engine did not begin: the trainer does not send now."""
        self._enter(self._views[name], "STALE")

    def must_restart(self, name: str) -> bool:
        """Whether the engine that is up is one that failed an update."""
        view = self._views[name]
        return view.state != "DOWN" and view.condemned is not None and view.condemned == view.incarnation

    def report(self) -> dict[str, EngineRecord]:
        """For status: per engine its state, since when, version and last error."""
        return {
            name: EngineRecord(view.state, view.since, view.version, self.must_restart(name), view.error)
            for name, view in self._views.items()
        }

    def _enter(self, view: EngineView, state: EngineState) -> None:
        if view.state != state:
            view.state, view.since = state, self._clock()

    def _advance(self) -> None:
        serving = [view.version for view in self._views.values() if view.version is not None]
        if serving:
            self.current_version = max(min(serving), -1 if self.current_version is None else self.current_version)


async def _no_hook(version: int) -> None:
    return None


class PolicyLoop:
    """Keeps engines at the wanted policy until cancelled.

    Args:
        engines: by process name.
        journal: gets an event for every update, failure and change of state.
        timeout_s: longest wait for one engine to take a policy; it is then restarted.
        poll_s: time between two looks at an engine; an engine that is current is looked at half as often.
        before_update: called with a new version before any engine is paused for it, so that rollouts which become too
            old can be dropped while engines still run.
        after_update: called when every serving engine has acknowledged a new version.
        sends: whether the trainer sends a version now; asked for policies that no directory holds.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        journal: Journal,
        timeout_s: float,
        poll_s: float = 0.5,
        before_update: Hook = _no_hook,
        after_update: Hook = _no_hook,
        sends: Callable[[int], bool] = lambda version: False,
    ) -> None:
        self.fleet = Fleet(engines)
        self._engines = dict(engines)
        self._journal = journal
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._before_update = before_update
        self._after_update = after_update
        self._sends = sends
        self._wake = {name: asyncio.Event() for name in engines}
        self._advanced = asyncio.Condition()
        self._announced: int | None = None
        self._requests: dict[str, asyncio.Task[Step]] = {}
        self._lost: set[str] = set()

    @property
    def current_version(self) -> int | None:
        """Newest version that every serving engine has acknowledged."""
        return self.fleet.current_version

    def wants_sender(self) -> bool:
        """Whether engines wait for a policy that only the trainer can give them."""
        wanted = self.fleet.wanted
        return wanted is not None and not wanted.path and self.fleet.wanting() > 0

    async def publish(self, policy: Policy) -> None:
        """Make `policy` the wanted one; repeating it changes nothing. Raises ValueError for an older version."""
        if self.fleet.wanted == policy:
            return
        await self._before_update(policy.version)
        self.fleet.want(policy)
        self._journal.write(PolicyWanted(policy.version, policy.path))
        for event in self._wake.values():
            event.set()

    async def wait_for(self, version: int, timeout_s: float) -> None:
        """Return once `current_version` has reached `version`. Raises TimeoutError."""

        def reached() -> bool:
            return self.current_version is not None and self.current_version >= version

        async with asyncio.timeout(timeout_s), self._advanced:
            await self._advanced.wait_for(reached)

    def moved(self, name: str, *, lost: bool) -> None:
        """An engine is somewhere else now, or was given up for good: what it was asked is not waited for any more."""
        if lost:
            self._lost.add(name)
        if request := self._requests.get(name):
            request.cancel()
        self._wake[name].set()

    async def run(self) -> None:
        """Look after all engines until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._engines:
                tasks.create_task(self._look_after(name))

    async def _look_after(self, name: str) -> None:
        wake = self._wake[name]
        while name not in self._lost:
            wake.clear()
            before = self.fleet.report()[name].state
            await self._observe(name)
            if self.fleet.must_restart(name):
                await self._restart(name)
            elif self.fleet.needs_update(name) and self._can_update(name):
                await self._update(name)
            after = self.fleet.report()[name].state
            if after != before:
                self._journal.write(EngineStateChanged(name, after, before))
            try:
                async with asyncio.timeout(2 * self._poll_s if after == "CURRENT" else self._poll_s):
                    await wake.wait()
            except TimeoutError:
                continue
        self.fleet.seen(name, None)
        self._journal.write(EngineGivenUp(name))
        await self._announce()

    async def _observe(self, name: str) -> None:
        status: EngineStatus | None
        try:
            status = await self._engines[name].status()
        except EngineDownError:
            status = None
        self.fleet.seen(name, status)
        await self._announce()

    def _can_update(self, name: str) -> bool:
        policy = self.fleet.wanted
        assert policy is not None
        return bool(policy.path) or not self.fleet.needs_weights(name) or self._sends(policy.version)

    async def _update(self, name: str) -> None:
        policy = self.fleet.wanted
        assert policy is not None
        self.fleet.updating(name)
        began = time.monotonic()
        try:
            step = await self._apply(name, policy)
        except EngineDownError as error:
            self.fleet.seen(name, None)
            self._journal.write(EngineLost(name, policy.version, str(error)))
        except NoSenderError:
            self.fleet.held(name)
        except EngineUpdateError as error:
            self.fleet.failed(name, str(error))
            self._journal.write(EngineUpdateFailed(name, policy.version, str(error)))
        else:
            self.fleet.updated(name, policy.version)
            parts = self._engines[name].seconds if step is Step.UPDATE else {}
            wait_s, load_s, pause_s = (_milliseconds(parts.get(part)) for part in ("wait", "load", "pause"))
            seconds = _milliseconds(time.monotonic() - began)
            self._journal.write(EngineUpdated(name, policy.version, step.value, seconds, wait_s, load_s, pause_s))
        await self._announce()

    async def _apply(self, name: str, policy: Policy) -> Step:
        """EngineClient.apply, ended early if the engine is moved."""
        request = asyncio.create_task(self._engines[name].apply(policy, self._timeout_s))
        self._requests[name] = request
        try:
            await asyncio.wait({request})
            if request.cancelled():
                raise EngineDownError(f"{name} is not there any more")
            return request.result()
        finally:
            request.cancel()
            del self._requests[name]

    async def _restart(self, name: str) -> None:
        try:
            await self._engines[name].shutdown()
        except EngineDownError:
            return  # it is already gone, or so broken that only its agent can end it: `report` says so
        self._journal.write(EngineRestarted(name))

    async def _announce(self) -> None:
        version = self.fleet.current_version
        if version is None or version == self._announced:
            return
        self._announced = version
        self._journal.write(PolicyCurrent(version))
        async with self._advanced:
            self._advanced.notify_all()
        await self._after_update(version)


def _milliseconds(seconds: float | None) -> float | None:
    """Seconds, to the millisecond."""
    return None if seconds is None else round(seconds, 3)

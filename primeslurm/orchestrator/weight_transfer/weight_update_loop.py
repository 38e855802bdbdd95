"""The policy loop: every engine is brought, and kept, at the wanted policy version.

It is level-triggered: it compares what each engine reports with what is wanted, and does what differs. So a new
policy, an engine that was restarted, and a run that was resumed are one and the same case to it.
`EnginePool` decides and does no I/O; `WeightUpdateLoop` asks and acts, one task per engine, so that none waits for
another.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.rollouts.job_protocol import AnswerCounts
from primeslurm.orchestrator.weight_transfer.damaged_answers import DamagedAnswers
from primeslurm.orchestrator.weight_transfer.engine_client import (
    EngineClient,
    EngineDownError,
    EngineUnresponsiveError,
    EngineUpdateError,
    EventLoopDelayedError,
    PolicyVersion,
    Step,
)
from primeslurm.orchestrator.weight_transfer.engine_pool import EnginePool
from primeslurm.orchestrator.weight_transfer.polling import EventLoopDelay, RateLimiter
from primeslurm.orchestrator.weight_transfer.sessions import NoSenderError, TransferSessions
from primeslurm.recipe import Recipe
from primeslurm.records.events.policy import (
    EngineAnswersDamaged,
    EngineGivenUp,
    EngineLost,
    EngineRestarted,
    EngineStateChanged,
    EngineUnresponsive,
    EngineUpdated,
    EngineUpdateFailed,
    EventLoopDelayed,
    PolicyCurrent,
    PolicyWanted,
)
from primeslurm.records.journal import Journal

MISSED_UPDATES = 3
"""An engine that did not answer so many updates in a row, and answers otherwise, is restarted."""
Hook = Callable[[int], Awaitable[None]]


async def _no_hook(version: int) -> None:
    return None


class WeightUpdateLoop:
    """Keeps engines at the wanted policy until cancelled.

    Args:
        engines: by process name.
        journal: gets an event for every update, failure and change of state.
        timeout_s: longest wait for one engine to take a policy; it is then restarted.
        poll_s: least time between two looks at an engine; an engine that is current is looked at half as often. Many
            engines share `POLLS_PER_S`.
        before_update: called with a new version before any engine is paused for it, so that rollouts which become too
            old can be dropped while engines still run.
        after_update: called when every serving engine has acknowledged a new version.
        sends: whether the trainer sends a version now; asked for policies that no directory holds.
        urls: where engines are at first, for `follow`.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        journal: Journal,
        timeout_s: float,
        *,
        poll_s: float = 0.5,
        before_update: Hook = _no_hook,
        after_update: Hook = _no_hook,
        sends: Callable[[int], bool] = lambda version: False,
        urls: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.pool = EnginePool(engines)
        self._engines = dict(engines)
        self._journal = journal
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._before_update = before_update
        self._after_update = after_update
        self._sends = sends
        self._urls = dict(urls)
        self._wake = {name: asyncio.Event() for name in engines}
        self._advanced = asyncio.Condition()
        self._announced: int | None = None
        self._requests: dict[str, asyncio.Task[Step]] = {}
        self._lost: set[str] = set()
        self._missed_updates: Counter[str] = Counter()
        self._damaged = DamagedAnswers()
        self._bad_because: dict[str, str] = {}
        """Why engines are restarted whose answers are damaged."""
        self.useless = ""
        """Why engines cannot be used, if that is so whichever is restarted."""
        self._pace = RateLimiter()
        self._own_delay = EventLoopDelay(self._stood_still)

    @property
    def current_version(self) -> int | None:
        """Return the newest version that every serving engine has acknowledged."""
        return self.pool.current_version

    def wants_transfer(self) -> bool:
        """Tell whether engines wait for a policy that only the trainer can give them."""
        wanted = self.pool.wanted
        return wanted is not None and not wanted.path and self.pool.wanting() > 0

    async def want(self, policy: PolicyVersion) -> None:
        """Make `policy` the wanted one; repeating it changes nothing. Raises ValueError for an older version."""
        if self.pool.wanted == policy:
            return
        await self._before_update(policy.version)
        self.pool.want(policy)
        self._journal.write(PolicyWanted(policy.version, policy.path))
        for event in self._wake.values():
            event.set()

    async def wait_for(self, version: int, timeout_s: float) -> None:
        """Return once `current_version` has reached `version`. Raises TimeoutError."""

        def reached() -> bool:
            return self.current_version is not None and self.current_version >= version

        async with asyncio.timeout(timeout_s), self._advanced:
            await self._advanced.wait_for(reached)

    def follow(self, urls: Mapping[str, str]) -> None:
        """Do without engines that were given up, and wait no longer for answers from where one was.

        Args:
            urls: where engines are now, by name; one that is missing was given up for good.
        """
        for name in self._engines:
            if urls.get(name) != self._urls.get(name):
                self._moved(name, lost=name not in urls)
        self._urls = dict(urls)

    def _moved(self, name: str, *, lost: bool) -> None:
        if lost:
            self._lost.add(name)
        if request := self._requests.get(name):
            request.cancel()
        self._wake[name].set()

    async def run(self) -> None:
        """Look after all engines until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            delay = tasks.create_task(self._own_delay.run())
            async with asyncio.TaskGroup() as engines:
                for name in self._engines:
                    engines.create_task(self._look_after(name))
            delay.cancel()  # all engines were given up

    async def _look_after(self, name: str) -> None:
        wake = self._wake[name]
        while name not in self._lost:
            woken = wake.is_set()
            wake.clear()
            before = self.pool.state(name)
            # A new policy waits for no look: whoever brings it asks the engine anyway.
            if not (woken and self.pool.needs_update(name)):
                await self._observe(name)
            if self.pool.must_restart(name):
                await self._restart(name)
            elif self.pool.needs_update(name) and self._can_update(name):
                await self._update(name)
            after = self.pool.state(name)
            if after != before:
                self._journal.write(EngineStateChanged(name, after, before, self.pool.down_because(name)))
            try:
                async with asyncio.timeout(2 * self._poll_s if after == "CURRENT" else self._poll_s):
                    await wake.wait()
            except TimeoutError:
                continue
        self.pool.seen(name, None, "given up")
        self._journal.write(EngineGivenUp(name))
        await self._announce()

    async def _observe(self, name: str) -> None:
        await self._pace.turn()
        try:
            self.pool.seen(name, await self._engines[name].status(self._own_delay.seconds))
        except EventLoopDelayedError:
            return  # nothing is known that was not known before
        except EngineUnresponsiveError as error:
            self._missed(name, error)
        except EngineDownError as error:
            self.pool.seen(name, None, str(error))
        await self._announce()

    def _missed(self, name: str, error: EngineUnresponsiveError) -> None:
        if self.pool.missed(name, str(error)):
            self._journal.write(EngineUnresponsive(name, str(error), self.pool.silent, len(self._engines)))

    def take_answers(self, reports: Mapping[str, AnswerCounts]) -> None:
        """Take in what a worker reports of engines' answers, and restart engines whose answers are damaged.

        Args:
            reports: by the address of the engine, or of its router if the router does not pass on which engine it was.
        """
        names = {url.partition("//")[2]: name for name, url in self._urls.items()}
        named = {names.get(where, f"an engine behind {where}"): answers for where, answers in reports.items()}
        for bad in self._damaged.add(named, self._urls):
            self._journal.write(EngineAnswersDamaged(bad.engine, bad.damaged, bad.answers, bad.error))
            if bad.again:
                self.useless = f"engines give no usable answers, also after a restart: {bad.engine}: {bad}"
            elif bad.engine in self._engines:
                self.pool.failed(bad.engine, str(bad), serves=True)
                self._bad_because[bad.engine] = "it gave damaged answers"
                self._wake[bad.engine].set()

    def _stood_still(self, seconds: float) -> None:
        self.pool.held_up(seconds)
        self._journal.write(EventLoopDelayed(round(seconds, 1)))

    def _can_update(self, name: str) -> bool:
        policy = self.pool.wanted
        assert policy is not None
        return bool(policy.path) or not self.pool.needs_weights(name) or self._sends(policy.version)

    async def _update(self, name: str) -> None:
        policy = self.pool.wanted
        assert policy is not None
        self.pool.updating(name)
        began = time.monotonic()
        try:
            step = await self._apply(name, policy)
        except EngineUnresponsiveError as error:
            self._journal.write(EngineLost(name, policy.version, str(error)))
            self._missed_updates[name] += 1
            if self._missed_updates[name] >= MISSED_UPDATES:
                self.pool.failed(name, str(error), serves=True)
                self._journal.write(EngineUpdateFailed(name, policy.version, str(error)))
            else:
                # It may still serve the old policy, and the new one is not announced meanwhile. Asked again, it takes
                # the policy, or is found to be gone.
                self.pool.held(name)
                self._missed(name, error)
        except EngineDownError as error:
            self.pool.seen(name, None, str(error))
            self._journal.write(EngineLost(name, policy.version, str(error)))
        except NoSenderError:
            self.pool.held(name)
        except EngineUpdateError as error:
            self.pool.failed(name, str(error))
            self._journal.write(EngineUpdateFailed(name, policy.version, str(error)))
        else:
            self._missed_updates[name] = 0
            self._bad_because.pop(name, None)
            self.pool.updated(name, policy.version)
            parts = self._engines[name].seconds if step is Step.UPDATE else {}
            wait_s, load_s, pause_s = (_milliseconds(parts.get(part)) for part in ("wait", "load", "pause"))
            seconds = _milliseconds(time.monotonic() - began)
            self._journal.write(EngineUpdated(name, policy.version, step.value, seconds, wait_s, load_s, pause_s))
        await self._announce()

    async def _apply(self, name: str, policy: PolicyVersion) -> Step:
        """EngineClient.apply, ended early if the engine is moved."""
        request = asyncio.create_task(self._engines[name].apply(policy, self._timeout_s, self._own_delay.seconds))
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
        self._journal.write(EngineRestarted(name, self._bad_because.get(name, "")))
        self._missed_updates[name] = 0
        self.pool.ended(name)
        await self._announce()

    async def _announce(self) -> None:
        version = self.pool.current_version
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


def weight_update_loop(
    recipe: Recipe,
    arguments: OrchestratorArguments,
    journal: Journal,
    *,
    sessions: TransferSessions | None = None,
    before_update: Hook = _no_hook,
    after_update: Hook = _no_hook,
) -> WeightUpdateLoop:
    """Make the loop of all engines of a run.

    Args:
        recipe: of the run.
        arguments: of its orchestrator.
        journal: gets what happens to engines.
        sessions: with the trainer, which sends policies that no directory holds. Default: there are none.
        before_update: as of `WeightUpdateLoop`.
        after_update: likewise.
    """
    url = arguments.addresses.url
    engines = {
        name: EngineClient(
            partial(url, name),
            recipe.model.path,
            sessions,
            trains_encoder=recipe.model.trains_encoder,
        )
        for name in arguments.engines
    }
    return WeightUpdateLoop(
        engines,
        journal,
        recipe.weights.timeout_s,
        before_update=before_update,
        after_update=after_update,
        sends=sessions.sends if sessions else lambda version: False,
        urls={name: url(name) for name in arguments.engines},
    )

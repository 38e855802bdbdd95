"""The weight update loop brings every engine to the wanted policy version, and keeps it there.

It compares the state of each engine with the wanted one, and fixes the difference. So a new policy, a restarted engine
and a resumed run are the same case. `EnginePool` decides without I/O, and `WeightUpdateLoop` polls and acts, with one
task per engine, so that no engine waits for another.
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
from primeslurm.orchestrator.weight_updates.damaged_answers import DamagedAnswers
from primeslurm.orchestrator.weight_updates.engine_client import (
    EngineClient,
    EngineDownError,
    EngineUnresponsiveError,
    EngineUpdateError,
    EventLoopDelayedError,
    PolicyVersion,
    Step,
)
from primeslurm.orchestrator.weight_updates.engine_pool import EnginePool
from primeslurm.orchestrator.weight_updates.polling import EventLoopDelay, RateLimiter
from primeslurm.orchestrator.weight_updates.sessions import NoSenderError, TransferSessions
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

MISSED_UPDATES = 3  # an engine that does not answer this many updates in a row, but answers polls, is restarted
Hook = Callable[[int], Awaitable[None]]


async def _no_hook(version: int) -> None:
    return None


async def _nothing() -> None:
    return None


class WeightUpdateLoop:
    """Keeps engines at the wanted policy.

    Args:
        journal: Receives an event for every update, failure and change of state.
        timeout_s: Longest time for one engine to load a policy. The engine is then restarted.
        poll_s: Minimum interval between two polls of an engine; twice as long for an engine that is current. The total
            rate is limited, too (`POLLS_PER_S`).
        before_update: Called with a new version before any engine is paused for it, so that rollouts that become too
            old can be dropped while engines still run.
        after_update: Called when every serving engine has acknowledged a new version.
        sends: Returns whether the trainer sends a version now. Called for policies without a directory.
        urls: URLs of engines by name at the start, for `follow`.
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
        after_engine: Callable[[], Awaitable[None]] = _nothing,
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
        self._after_engine = after_engine
        self._sends = sends
        self._urls = dict(urls)
        self._wake = {name: asyncio.Event() for name in engines}
        self._advanced = asyncio.Condition()
        self._announced: int | None = None
        self._requests: dict[str, asyncio.Task[Step]] = {}
        self._lost: set[str] = set()
        self._missed_updates: Counter[str] = Counter()
        # Parts of the last update of each engine [s], and its version
        self._parts: dict[str, tuple[int, Mapping[str, float]]] = {}
        self._damaged = DamagedAnswers()
        self._restart_reason: dict[str, str] = {}  # why engines are restarted that answer updates
        self.useless = ""  # why no engine can be used, if restarts do not help
        self._poll_rate = RateLimiter()
        self._own_delay = EventLoopDelay(self._delayed)

    @property
    def current_version(self) -> int | None:
        return self.pool.current_version

    def wants_transfer(self) -> bool:
        wanted = self.pool.wanted
        return wanted is not None and not wanted.path and self.pool.wanting() > 0

    def update_metrics(self) -> dict[str, float]:
        """Return the parts of the newest weight update [s], each of the engine that took longest."""
        newest = max((version for version, _ in self._parts.values()), default=-1)
        parts = [seconds for version, seconds in self._parts.values() if version == newest]
        if not parts:
            return {}
        return {
            "policy/update_wait_seconds": max(each["wait"] for each in parts),
            "policy/update_load_seconds": max(each["load"] for each in parts),
            "policy/update_pause_seconds": max(each["pause"] for each in parts),
        }

    async def want(self, policy: PolicyVersion) -> None:
        """Set the wanted policy. A repetition changes nothing. Raise ValueError for an older version."""
        if self.pool.wanted == policy:
            return
        await self._before_update(policy.version)
        self.pool.want(policy)
        self._journal.write(PolicyWanted(policy.version, policy.path))
        for event in self._wake.values():
            event.set()

    async def wait_for(self, version: int, timeout_s: float) -> None:
        """Wait until `current_version` has reached `version`. Raise TimeoutError."""

        def reached() -> bool:
            return self.current_version is not None and self.current_version >= version

        async with asyncio.timeout(timeout_s), self._advanced:
            await self._advanced.wait_for(reached)

    def follow(self, urls: Mapping[str, str]) -> None:
        """Stop waiting for answers from old addresses, and drop engines without a URL, which were given up."""
        self._lost |= self._engines.keys() - urls.keys()  # some may never have had a URL in this process
        for name in self._engines:
            if urls.get(name) == self._urls.get(name):
                continue
            if request := self._requests.get(name):
                request.cancel()
            self._wake[name].set()
        self._urls = dict(urls)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            delay = tasks.create_task(self._own_delay.run())
            async with asyncio.TaskGroup() as engines:
                for name in self._engines:
                    engines.create_task(self._run_engine(name))
            delay.cancel()  # all engines were given up

    async def _run_engine(self, name: str) -> None:
        wake = self._wake[name]
        while name not in self._lost:
            woken = wake.is_set()
            wake.clear()
            before = self.pool.state(name)
            # A new policy needs no poll first, because the update itself asks for the engine's status.
            if not (woken and self.pool.needs_update(name)):
                await self._poll(name)
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

    async def _poll(self, name: str) -> None:
        await self._poll_rate.turn()
        try:
            self.pool.seen(name, await self._engines[name].status(self._own_delay.seconds))
        except EventLoopDelayedError:
            return
        except EngineUnresponsiveError as error:
            self._missed(name, error)
        except EngineDownError as error:
            self.pool.seen(name, None, str(error))
        await self._announce()

    def _missed(self, name: str, error: EngineUnresponsiveError) -> None:
        if self.pool.missed(name, str(error)):
            self._journal.write(EngineUnresponsive(name, str(error), self.pool.unresponsive, len(self._engines)))

    def take_answers(self, reports: Mapping[str, AnswerCounts]) -> None:
        """Add a worker's counts of engines' answers, and restart engines that give damaged ones.

        `reports`: counts by address of the engine, or of its router if the router does not name the engine.
        """
        names = {url.partition("//")[2]: name for name, url in self._urls.items()}
        by_name = {names.get(address, f"an engine behind {address}"): counts for address, counts in reports.items()}
        for bad in self._damaged.add(by_name, self._urls):
            self._journal.write(EngineAnswersDamaged(bad.engine, bad.damaged, bad.answers, bad.error))
            if bad.again:
                self.useless = f"engines give no usable answers, also after a restart: {bad.engine}: {bad}"
            elif bad.engine in self._engines:
                self.pool.failed(bad.engine, str(bad), serves=True)
                self._restart_reason[bad.engine] = "it gave damaged answers"
                self._wake[bad.engine].set()

    def _delayed(self, seconds: float) -> None:
        self.pool.delayed(seconds)
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
        except EngineDownError as error:
            self._journal.write(EngineLost(name, policy.version, str(error)))
            await self._missed_update(name, policy, error)
        except NoSenderError:
            self.pool.update_pending(name)
        except EngineUpdateError as error:
            self.pool.failed(name, str(error))
            self._journal.write(EngineUpdateFailed(name, policy.version, str(error)))
        else:
            self._missed_updates[name] = 0
            self._restart_reason.pop(name, None)
            self.pool.updated(name, policy.version)
            parts = self._engines[name].seconds if step is Step.UPDATE else {}
            wait_s, load_s, pause_s = (
                None if (part_s := parts.get(part)) is None else round(part_s, 3) for part in ("wait", "load", "pause")
            )
            if parts:
                self._parts[name] = policy.version, dict(parts)
            seconds = round(time.monotonic() - began, 3)
            self._journal.write(EngineUpdated(name, policy.version, step.value, seconds, wait_s, load_s, pause_s))
        await self._after_engine()
        await self._announce()

    async def _missed_update(self, name: str, policy: PolicyVersion, error: EngineDownError) -> None:
        # It may still serve the old policy, so the new one is not announced yet. A poll shows whether it is down, and
        # otherwise the next try updates it.
        self.pool.update_pending(name)
        if isinstance(error, EngineUnresponsiveError):
            self._missed(name, error)
        else:
            await self._poll(name)
        if self.pool.state(name) == "DOWN":
            self._missed_updates[name] = 0
            return
        self._missed_updates[name] += 1
        if self._missed_updates[name] >= MISSED_UPDATES:
            self.pool.failed(name, str(error), serves=True)
            self._journal.write(EngineUpdateFailed(name, policy.version, str(error)))

    async def _apply(self, name: str, policy: PolicyVersion) -> Step:
        """Call EngineClient.apply, but stop if the engine moves."""
        request = asyncio.create_task(self._engines[name].apply(policy, self._timeout_s, self._own_delay.seconds))
        self._requests[name] = request
        try:
            await asyncio.wait({request})
            if request.cancelled():
                raise EngineDownError(f"{name} has moved or was given up")
            return request.result()
        finally:
            request.cancel()
            del self._requests[name]

    async def _restart(self, name: str) -> None:
        try:
            await self._engines[name].shutdown()
        except EngineDownError:
            return  # it is down already, or only its agent can end it, which `EnginePool.report` tells the agent
        self._journal.write(EngineRestarted(name, self._restart_reason.get(name, "")))
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


def weight_update_loop(
    recipe: Recipe,
    arguments: OrchestratorArguments,
    journal: Journal,
    *,
    sessions: TransferSessions | None = None,
    before_update: Hook = _no_hook,
    after_update: Hook = _no_hook,
) -> WeightUpdateLoop:
    """Create the loop for all engines of a run. `sessions`: with a trainer that sends policies without a directory."""
    url = arguments.addresses.url
    options = {"trains_encoder": recipe.model.trains_encoder, "adapter": recipe.sends_adapter}
    engines = {
        name: EngineClient(partial(url, name), recipe.model.path, sessions, **options) for name in arguments.engines
    }
    return WeightUpdateLoop(
        engines,
        journal,
        recipe.weights.load_s,
        before_update=before_update,
        after_update=after_update,
        sends=sessions.sends if sessions else lambda version: False,
        after_engine=sessions.look_again if sessions else _nothing,
        urls=arguments.engine_urls(),
    )

"""Complete groups are judged and written while the event loop goes on, and count in order, once they are on disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from primeslurm.base import durable, files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.orchestrator.algorithms import Algorithm, Grpo
from primeslurm.orchestrator.pipeline.finalize import GroupFinalizer
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool
from tests.unit.orchestrator.test_group_filter import admission, group, rollout


class Told:
    """What became of groups; whether each was on disk when it was told of."""

    def __init__(self, tmp_path: Path, algorithm: Algorithm | None = None) -> None:
        self.said: list[tuple[str, str, bool]] = []
        self.spool = Spool(tmp_path / "rollouts")
        judges = admission(tmp_path, algorithm, orchestrator={"filters": [{"type": "zero_advantage"}]})
        self.finishing = GroupFinalizer(judges, self.spool, self._kept, self._rejected, self._scored, retry_s=0.01)
        self._directory = tmp_path / "rollouts"

    def on_disk(self, name: str) -> bool:
        return (self._directory / f"{name}.group").exists()

    def _say(self, what: str, group: RolloutGroup) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.said.append((what, group.id, self.on_disk(group.id)))

    def _kept(self, group: RolloutGroup) -> None:
        self._say("kept", group)

    def _rejected(self, group: RolloutGroup, reason: str) -> None:
        self._say(reason, group)

    def _scored(self, group: RolloutGroup) -> None:
        self._say("scored", group)

    async def until(self, count: int) -> None:
        """Finish until so much was said."""
        running = asyncio.create_task(self.finishing.run())
        while len(self.said) < count and not running.done():
            await asyncio.sleep(0.001)
        running.cancel()
        (ended,) = await asyncio.gather(running, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            raise ended


def good(name: str) -> RolloutGroup:
    return group(rollout(1.0), rollout(0.0), name=name)


async def test_groups_count_in_order_once_they_are_on_disk(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.finishing.complete(good("a"))
    told.finishing.complete(group(rollout(1.0), rollout(1.0), name="b"))
    told.finishing.scored(good("c"))
    await told.until(3)
    assert told.said == [("kept", "a", True), ("zero_advantage", "b", False), ("scored", "c", True)]


async def test_the_event_loop_goes_on_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge and a disk that stand still until the loop has had a thousand turns."""
    turns = threading.Event()

    class Slow(Grpo):
        def rejects(self, group: RolloutGroup) -> str | None:
            assert turns.wait(60)
            return None

    def put(spool: Spool, group: RolloutGroup, original: Any = Spool.put) -> bool:
        assert turns.wait(60)
        return bool(original(spool, group))

    async def turn() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
        turns.set()

    monkeypatch.setattr(Spool, "put", put)
    told = Told(tmp_path, Slow())
    told.finishing.complete(good("a"))
    await asyncio.gather(told.until(1), turn())
    assert told.said == [("kept", "a", True)]


async def test_a_full_disk_holds_groups_back(tmp_path: Path) -> None:
    told = Told(tmp_path)
    assert durable.fill_reserve(tmp_path) and files.release_reserve(tmp_path)
    told.finishing.complete(good("a"))
    told.finishing.complete(good("b"))
    running = asyncio.create_task(told.until(2))
    while not told.spool.waiting:
        await asyncio.sleep(0.001)
    assert not told.said
    assert durable.fill_reserve(tmp_path)
    await running
    assert told.said == [("kept", "a", True), ("kept", "b", True)] and not told.spool.waiting


async def test_files_are_deleted_after_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, begun, go_on = Told(tmp_path), threading.Event(), threading.Event()

    def put(spool: Spool, group: RolloutGroup, original: Any = Spool.put) -> bool:
        begun.set()
        assert go_on.wait(60)
        return bool(original(spool, group))

    monkeypatch.setattr(Spool, "put", put)
    told.finishing.scored(good("a"))
    running = asyncio.create_task(told.until(1))
    await asyncio.to_thread(begun.wait, 60)
    deleting = told.finishing.delete(["a", "never-there"])
    go_on.set()
    await deleting
    await running
    assert not told.on_disk("a")


async def test_a_mistake_of_an_algorithm_ends_the_run(tmp_path: Path) -> None:
    class Wrong(Grpo):
        def rejects(self, group: RolloutGroup) -> str | None:
            raise UsageError([Violation("orchestrator.algorithm", "", "it is wrong")])

    told = Told(tmp_path, Wrong())
    told.finishing.complete(good("a"))
    with pytest.raises(UsageError, match="it is wrong"):
        await told.until(1)
    assert not told.said and not told.on_disk("a")

"""The finalize stage: groups are filtered and written in a thread, in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from primeslurm.base import durable, files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.orchestrator.algorithms import Algorithm, Grpo
from primeslurm.orchestrator.pipeline.finalize import CompleteGroup, FinalizedGroup, GroupFinalizer
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.recipe.sections.slurm import KeptRollouts
from tests.unit.orchestrator.test_group_filter import group, group_filter, rollout


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "rollouts")


@pytest.fixture
def finalizer(tmp_path: Path, spool: Spool) -> Iterator[GroupFinalizer]:
    made = finalizer_of(tmp_path, spool)
    yield made
    made.close()


def finalizer_of(tmp_path: Path, spool: Spool, algorithm: Algorithm | None = None) -> GroupFinalizer:
    filters = group_filter(tmp_path, algorithm, orchestrator={"filters": [{"type": "zero_advantage"}]})
    recorder = RolloutRecorder(tmp_path, 1, KeptRollouts(), lambda: 1)
    return GroupFinalizer(filters, spool, recorder, retry_s=0.01)


def good(name: str) -> CompleteGroup:
    return CompleteGroup(group(rollout(1.0), rollout(0.0), name=name))


def is_on_disk(tmp_path: Path, name: str) -> bool:
    return (tmp_path / "rollouts" / f"{name}.group").exists()


async def test_finalized_groups_are_on_disk_or_rejected(tmp_path: Path, finalizer: GroupFinalizer) -> None:
    dull = group(rollout(1.0), rollout(1.0), name="b")
    complete = good("a")
    assert await finalizer.finalize(complete) == FinalizedGroup(complete.group)
    assert await finalizer.finalize(CompleteGroup(dull)) == FinalizedGroup(dull, rejected="zero_advantage")
    assert await finalizer.finalize(CompleteGroup(dull, is_scored=True)) == FinalizedGroup(dull, is_scored=True)
    assert is_on_disk(tmp_path, "a") and is_on_disk(tmp_path, "b"), "a scored group is not filtered again"


async def test_event_loop_continues_during_filters_and_writes(
    tmp_path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filter and disk block until the event loop has had a thousand turns."""
    turns, put = threading.Event(), Spool.put

    class Slow(Grpo):
        def rejects(self, group: RolloutGroup) -> str | None:
            assert turns.wait(60)
            return None

    async def turn() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
        turns.set()

    monkeypatch.setattr(Spool, "put", lambda spool, group: turns.wait(60) and put(spool, group))
    finalizer = finalizer_of(tmp_path, spool, Slow())
    await asyncio.gather(finalizer.finalize(good("a")), turn())
    assert is_on_disk(tmp_path, "a")
    finalizer.close()


async def test_full_disk_holds_groups_back(tmp_path: Path, spool: Spool, finalizer: GroupFinalizer) -> None:
    assert durable.fill_reserve(tmp_path) and files.release_reserve(tmp_path)
    finalizing = asyncio.create_task(finalizer.finalize(good("a")))
    while not spool.waiting:
        await asyncio.sleep(0.001)
    assert not finalizing.done()
    assert durable.fill_reserve(tmp_path)
    await finalizing
    assert is_on_disk(tmp_path, "a") and not spool.waiting


async def test_group_is_deleted_after_its_write(
    tmp_path: Path, finalizer: GroupFinalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_write = threading.Event(), threading.Event()

    def put(spool: Spool, group: RolloutGroup, original: Any = Spool.put) -> bool:
        writing.set()
        assert may_write.wait(60)
        return bool(original(spool, group))

    monkeypatch.setattr(Spool, "put", put)
    finalizing = asyncio.create_task(finalizer.finalize(good("a")))
    await asyncio.to_thread(writing.wait, 60)
    deleting = asyncio.create_task(finalizer.delete(["a", "unknown"]))
    await asyncio.sleep(0)
    may_write.set()
    await asyncio.gather(deleting, finalizing)
    assert not is_on_disk(tmp_path, "a")


async def test_error_of_an_algorithm_is_raised(tmp_path: Path, spool: Spool) -> None:
    class Wrong(Grpo):
        def rejects(self, group: RolloutGroup) -> str | None:
            raise UsageError([Violation("orchestrator.algorithm", "", "it is wrong")])

    finalizer = finalizer_of(tmp_path, spool, Wrong())
    with pytest.raises(UsageError, match="it is wrong"):
        await finalizer.finalize(good("a"))
    assert not is_on_disk(tmp_path, "a")
    finalizer.close()

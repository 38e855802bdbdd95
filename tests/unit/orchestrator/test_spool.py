"""Finished groups and progress survive; a full disk and a damaged file do not end the run."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.base import durable, files
from primeslurm.base.errors import RunError
from primeslurm.base.files import Content
from primeslurm.orchestrator.algorithms import Grpo, from_recipe
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.dispatch import Dispatcher
from primeslurm.orchestrator.dispatch.curricula import OUTCOMES, Curricula
from primeslurm.orchestrator.pipeline.progress import (
    CHECKPOINT_PART,
    PROGRESS,
    ProgressFile,
    RunProgress,
    recover,
    restore,
)
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool, SpooledGroup
from primeslurm.recipe import Recipe
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.weight_transfer.messages import NewPolicy
from tests.support.recipes import recipe_data
from tests.unit.orchestrator.test_dispatch import limits, make_dispatcher, run_all
from tests.unit.orchestrator.test_packing import advantages, group


def test_group_is_restored_from_disk(tmp_path: Path) -> None:
    made = group([3, 7], [0.25, 1.0])
    assert Spool(tmp_path).put(made)
    (again,) = Spool(tmp_path).load()
    assert again.to_bytes() == made.to_bytes()
    assert advantages(again, Grpo()) == [-0.375, 0.375] and again.has_signal
    Spool(tmp_path).delete(["g", "never-there"])
    assert Spool(tmp_path).load() == []


def test_group_with_more_sequences_than_a_short_list_is_decoded() -> None:
    many = RolloutGroup("g", "e", 0, 0, (group([3, 7], [0.25, 1.0]).sequences * 20,))
    assert RolloutGroup.from_bytes(many.to_bytes()).to_bytes() == many.to_bytes()


def test_arrays_are_not_copied() -> None:
    made = group([300], [0.5])
    tokens = made.sequences[0].token_ids
    parts = [np.frombuffer(part, np.uint8) for part in made.to_parts() if isinstance(part, memoryview)]
    assert any(np.shares_memory(part, tokens) for part in parts)
    data = np.frombuffer(made.to_bytes(), np.uint8)
    assert np.shares_memory(RolloutGroup.from_bytes(data.data).sequences[0].token_ids, data)


@pytest.mark.parametrize("damage", [lambda data: data[:20], lambda data: b"nothing of the kind"])
def test_damaged_file_is_set_aside(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    Spool(tmp_path).put(group([3], [0.5]))
    path = tmp_path / "g.group"
    path.write_bytes(damage(path.read_bytes()))
    spool = Spool(tmp_path)
    assert spool.load() == [] and list(spool.damaged) == ["g"]
    assert [p.name for p in tmp_path.iterdir()] == ["g.group"], "until it is on record that its example comes again"
    spool.delete(["g"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.damaged", "g.damaged.txt"]
    assert (tmp_path / "g.damaged.txt").read_text().strip(), "the reason"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_groups_wait_in_memory_while_the_disk_is_full_or_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def full(path: Path, data: Content) -> None:
        raise OSError(number, os.strerror(number))

    spool = Spool(tmp_path)
    monkeypatch.setattr("primeslurm.base.durable.write", full)
    made = group([3], [0.5])
    assert not spool.put(made) and not spool.put(made)
    assert len(caplog.records) == 1, "who tries again every second says so once"
    assert list(tmp_path.iterdir()) == []
    assert spool.waiting == {made.id: made}
    monkeypatch.undo()
    assert spool.put(made)
    assert spool.waiting == {} and [again.id for again in Spool(tmp_path).load()] == [made.id]


def test_groups_do_not_use_space_reserved_for_records(tmp_path: Path) -> None:
    spool, made = Spool(tmp_path / "rollouts"), group([3], [0.5])
    assert durable.fill_reserve(tmp_path) and files.release_reserve(tmp_path)
    assert not spool.put(made) and made.id in spool.waiting
    assert durable.fill_reserve(tmp_path)
    assert spool.put(made)
    assert spool.waiting == {} and [again.id for again in spool.load()] == [made.id]
    assert files.release_reserve(tmp_path) and not spool.put(made)
    spool.delete([made.id])
    assert spool.waiting == {}, "what is not wanted any more waits for nothing"


def commit(run_dir: Path, step: int, progress: RunProgress) -> None:
    directory = checkpoints.step_dir(run_dir, step)
    progress.save(directory / CHECKPOINT_PART)
    checkpoints.commit(directory, step, progress.attempt)


def test_attempt_continues_from_its_own_progress(tmp_path: Path) -> None:
    progress = RunProgress(1, 4, 3, NewPolicy(3, "/w"), {"a": 9}, [("a", 7)], {3: ["a-00000001"]})
    commit(tmp_path, 2, RunProgress(1, 3, 2))
    progress.save(tmp_path / PROGRESS)
    assert restore(tmp_path, 1) == progress


def test_spooled_groups_keep_their_names(tmp_path: Path) -> None:
    record = {"attempt": 1, "published": {"type": "Published", "version": 3, "path": "/w"}}
    path = tmp_path / PROGRESS
    path.parent.mkdir()
    path.write_bytes(msgspec.msgpack.encode(record))
    assert restore(tmp_path, 1) == RunProgress(1, published=NewPolicy(3, "/w"))
    restore(tmp_path, 1).save(path)
    assert msgspec.msgpack.decode(path.read_bytes())["published"] == record["published"]


def test_new_attempt_continues_from_the_last_commit(tmp_path: Path) -> None:
    saved = RunProgress(1, 5, 2, NewPolicy(2, "/w"), {"a": 9}, [("a", 7)], {2: ["x"], 4: ["y"]})
    commit(tmp_path, 2, saved)
    RunProgress(1, 9, 8).save(tmp_path / PROGRESS)
    assert restore(tmp_path, 2) == RunProgress(2, 3, 2, None, {"a": 9}, [("a", 7)], {2: ["x"]}, committed=2)


@pytest.mark.parametrize("emptied", [CHECKPOINT_PART, "trainer.distcp", checkpoints.COMMITTED])
@pytest.mark.parametrize("aside", [False, True], ids=["before", "after"])
def test_new_attempt_skips_a_damaged_checkpoint(tmp_path: Path, emptied: str, aside: bool) -> None:
    for step in (2, 4):
        directory = checkpoints.step_dir(tmp_path, step)
        directory.mkdir(parents=True)
        (directory / "trainer.distcp").write_bytes(b"tensors")
        commit(tmp_path, step, RunProgress(1, step + 1, step, cursors={"a": step}))
    (checkpoints.step_dir(tmp_path, 4) / emptied).write_bytes(b"")
    if aside:
        assert checkpoints.set_damaged_aside(tmp_path, 2) == 2
    assert restore(tmp_path, 2) == RunProgress(2, 3, 2, cursors={"a": 2}, committed=2)
    assert checkpoints.set_damaged_aside(tmp_path, 2) == 2
    assert (tmp_path / "checkpoints" / "step_000004.damaged-2").exists()
    assert emptied in (tmp_path / "checkpoints" / "step_000004.damaged-2.txt").read_text()


def test_commit_without_orchestrator_part_is_refused(tmp_path: Path) -> None:
    directory = checkpoints.step_dir(tmp_path, 2)
    directory.mkdir(parents=True)
    checkpoints.commit(directory, 2, 1)
    with pytest.raises(RunError, match=r"orchestrator\.bin"):
        restore(tmp_path, 2)


def test_progress_is_on_disk_before_it_counts(tmp_path: Path) -> None:
    dispatch = make_dispatcher(limits())
    curricula = Curricula(Recipe.model_validate(recipe_data()), tmp_path / OUTCOMES)
    file = ProgressFile(tmp_path / PROGRESS, RunProgress(1), dispatch, curricula)
    asyncio.run(file.record(lambda now: {"next_step": 2, "batches": {1: ["x"]}}))
    assert file.now == restore(tmp_path, 1) == RunProgress(1, 2, cursors={"a": 0, "b": 0}, batches={1: ["x"]})
    run_all(dispatch)
    assert dispatch.unfinished and dispatch.cursors != file.now.cursors
    (tmp_path / PROGRESS).unlink()
    (tmp_path / PROGRESS).parent.rmdir()
    (tmp_path / PROGRESS).parent.write_text("in the way")
    before = file.now
    with pytest.raises(FileExistsError):
        asyncio.run(file.record(lambda now: {"next_step": 3}))
    assert file.now is before
    asyncio.run(file.note(lambda now: {"done_step": 1}))
    assert (file.now.done_step, file.now.next_step, file.now.unfinished) == (1, 2, dispatch.unfinished)


def test_records_are_written_in_order_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch, may_write = make_dispatcher(limits()), threading.Event()
    curricula = Curricula(Recipe.model_validate(recipe_data()), tmp_path / OUTCOMES)
    file = ProgressFile(tmp_path / PROGRESS, RunProgress(1), dispatch, curricula)
    save = RunProgress.save
    monkeypatch.setattr(RunProgress, "save", lambda record, path: may_write.wait(60) and save(record, path))

    async def both() -> None:
        first = asyncio.create_task(file.record(lambda now: {"batches": {**now.batches, 1: ["x"]}}))
        second = asyncio.create_task(file.note(lambda now: {"batches": {**now.batches, 2: ["y"]}}))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not file.now.batches and not first.done(), "nothing counts that is not on disk"
        run_all(dispatch)
        dispatch.apply_age_limit(3)
        may_write.set()
        await first
        assert restore(tmp_path, 1).batches.keys() >= {1}
        await second

    asyncio.run(both())
    found = restore(tmp_path, 1)
    assert found == file.now and found.batches == {1: ["x"], 2: ["y"]}, "the second is made of the first"
    assert found.returned and set(found.returned) == set(dispatch.returned)


RECIPE = Recipe.model_validate(recipe_data())
LABEL = RECIPE.environments[0].label


def example(number: int) -> RolloutGroup:
    return replace(group([3, 7], [0.25, 1.0]), id=f"{LABEL}-{number:08d}", environment=LABEL, example=number)


def recovered(run: Path) -> tuple[Dispatcher, list[str], Spool]:
    arguments = OrchestratorArguments(run, 1, "run", "", "", ["router-0"], ["engine-r0-0"])
    spool, progress = Spool(run / "rollouts"), RunProgress(1, cursors={LABEL: 3})
    batches, curricula = Batches(RECIPE, from_recipe(RECIPE)), Curricula(RECIPE, run / OUTCOMES)
    return *recover(RECIPE, arguments, progress, spool, batches, curricula), spool


def refuse_groups(path: Path) -> bytes:
    """Fail if more than the head of a group is read."""
    if "rollouts" in path.parts:
        pytest.fail(f"{path} was read whole")
    with path.open("rb") as file:
        return file.read()


def test_restart_reads_only_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        Spool(tmp_path / "rollouts").put(example(number))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse_groups)
        dispatcher, gone, _ = recovered(tmp_path)
    assert not gone and all(isinstance(one, SpooledGroup) for one in dispatcher.ready)
    whole = example(0)
    head = next(iter(dispatcher.ready))
    for name in ("id", "environment", "example", "opened_version", "task", "size"):
        assert getattr(head, name) == getattr(whole, name)
    assert (head.newest_version, head.given_rewards, head.scored) == (whole.newest_version, [0.25, 1.0], False)
    assert head.whole().to_bytes() == whole.to_bytes()


@given(data=st.data())
def test_damaged_file_costs_one_group(data: st.DataObject) -> None:
    with TemporaryDirectory() as directory:
        run = Path(directory)
        for number in range(3):
            Spool(run / "rollouts").put(example(number))
        path = run / "rollouts" / f"{LABEL}-00000001.group"
        raw = bytearray(path.read_bytes())
        where = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[where] ^= data.draw(st.integers(1, 255))
        else:
            del raw[where:]
        path.write_bytes(raw)
        dispatcher, gone, spool = recovered(run)
        broken = f"{LABEL}-00000001"
        if len(dispatcher.ready) == 3:
            with pytest.raises(DamagedError) as error:
                next(one for one in dispatcher.ready if one.id == broken).whole()
            spool.note_damaged(broken, error.value)
            dispatcher.give_up_damaged(broken)
            gone = [broken]
        assert gone == [broken] and [one.example for one in dispatcher.ready] == [0, 2]
        assert dispatcher.unfinished == [(LABEL, 1)] and dispatcher.counts["groups_damaged"] == 1
        spool.delete(gone)
        assert not path.exists() and path.with_suffix(".damaged").exists()
        assert spool.put(example(1)) and [one.id for one in spool.load()][1] == broken


def test_interrupted_write_is_no_group(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "rollouts")
    spool.put(example(0))
    (tmp_path / "rollouts" / f".{LABEL}-00000001.group.abc.tmp").write_bytes(example(1).to_bytes()[:50])
    dispatcher, gone, again = recovered(tmp_path)
    assert [one.example for one in dispatcher.ready] == [0] and not gone and not again.damaged

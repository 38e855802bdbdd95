"""Asynchronous checkpoints."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from primeslurm.base import durable, files
from primeslurm.records.journal import Journal
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.distributed.world import RankError, World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.stored import checkpoints
from tests.trainer.conftest import exported, make_batch, make_recipe, make_timer


class Disk:
    """A fake of torch's writer that waits for permission to write, and may fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.error: OSError | None = None
        real = state_dict_saver.save

        def save(*args: Any, **kwargs: Any) -> Any:
            assert self.free.wait(60)
            if self.error is not None:
                raise self.error
            return real(*args, **kwargs)

        patch.setattr(state_dict_saver, "save", save)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A lock that blocks writes."""
    disk = Disk(monkeypatch)
    yield disk
    disk.free.set()


class Run:
    """A rank that trains in a directory and saves every second step."""

    def __init__(self, directory: Path, model: Path, world: World, attempt: int = 1) -> None:
        recipe = make_recipe(
            model, max_steps=9, trainer={"optimizer": {"lr": 1e-2}}, checkpoint={"interval": 2, "asynchronous": True}
        )
        self.train_step = TrainStep(build(recipe, world), recipe, world)
        self.saver = Checkpoints(directory, attempt, recipe.checkpoint, world, None, pause_s=0.01)
        self.timer: PhaseTimer = make_timer(directory)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.train_step.train(make_batch(step), self.timer)
            self.saver.after(step, self.train_step, self.timer)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in exported(self.train_step.policy).items()}


def test_training_continues_during_a_checkpoint(moe_model: Path, world: World, disk: Disk, tmp_path: Path) -> None:
    run = Run(tmp_path, moe_model, world)
    run.train(1, 2)
    at_two = run.weights()
    run.train(3)
    assert checkpoints.committed(tmp_path) == []
    disk.free.set()
    run.train(4)  # one at a time: waits for step 2
    assert checkpoints.committed(tmp_path)[0] == 2
    run.train(5)
    run.saver.finish(5, run.train_step, run.timer)
    assert checkpoints.committed(tmp_path) == [4, 5], "keep: 2"
    events = [json.loads(line) for line in (tmp_path / "events" / "test.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "committed"] == [2, 4, 5]

    again = Run(tmp_path / "again", moe_model, world)
    again.train(1, 2)
    assert all(torch.equal(tensor, at_two[name]) for name, tensor in again.weights().items())
    again.train(3)
    again.saver.finish(2, again.train_step, again.timer)
    resumed = Run(tmp_path / "again", moe_model, world, attempt=2)
    assert resumed.saver.restore(resumed.train_step) == 2
    assert all(torch.equal(tensor, at_two[name]) for name, tensor in resumed.weights().items())
    resumed.train(3)
    expected = again.weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.weights().items())


def test_attempt_that_ends_during_a_write_keeps_commits(
    moe_model: Path, world: World, disk: Disk, tmp_path: Path
) -> None:
    disk.free.set()
    run = Run(tmp_path, moe_model, world)
    run.train(1, 2)
    at_two = run.weights()
    run.saver.finish(2, run.train_step, run.timer)
    disk.free.clear()
    second = Run(tmp_path, moe_model, world, attempt=2)
    second.saver.restore(second.train_step)
    second.train(3, 4)
    assert checkpoints.step_dir(tmp_path, 4).is_dir(), "begun"
    third = Run(tmp_path, moe_model, world, attempt=3)
    assert third.saver.restore(third.train_step) == 2
    assert all(torch.equal(tensor, at_two[name]) for name, tensor in third.weights().items())


def test_broken_disk_is_reported_without_commit(moe_model: Path, world: World, disk: Disk, tmp_path: Path) -> None:
    run = Run(tmp_path, moe_model, world)
    disk.error = OSError("input/output error")
    run.train(1, 2)
    disk.free.set()
    with pytest.raises(RankError, match="checkpoint of step 2 failed: rank 0: input/output error"):
        run.saver.finish(2, run.train_step, run.timer)
    assert checkpoints.committed(tmp_path) == []


@pytest.mark.parametrize("ends", [False, True], ids=["goes-on", "ends"])
def test_checkpoint_lost_to_full_disk_is_saved_at_the_next_step(
    ends: bool, moe_model: Path, world: World, disk: Disk, tmp_path: Path
) -> None:
    run = Run(tmp_path, moe_model, world)
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    disk.free.set()
    run.train(1, 2)
    failed = run.saver._pending
    assert failed is not None
    with contextlib.suppress(BaseException):
        failed.done.result(60)
    disk.error = None
    if not ends:
        run.train(3)
    run.saver.finish(3 if not ends else 2, run.train_step, run.timer)
    assert checkpoints.committed(tmp_path) == [2 if ends else 3]


def test_save_waits_for_disk_space(
    moe_model: Path, world: World, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tries, begin = Run(tmp_path, moe_model, world), [], Checkpoints._begin
    assert durable.fill_reserve(tmp_path) and files.release_reserve(tmp_path)

    def full(saver: Checkpoints, directory: Path, step: int, journal: Journal) -> None:
        assert not durable.reserve_released(tmp_path), "what is left is for records"
        tries.append(step)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        if len(tries) < 5:
            raise OSError(errno.EROFS, "Read-only file system")
        begin(saver, directory, step, journal)

    monkeypatch.setattr(Checkpoints, "_begin", full)
    disk.free.set()
    threading.Timer(0.2, durable.fill_reserve, [tmp_path]).start()
    run.train(1, 2)
    run.saver.finish(2, run.train_step, run.timer)
    assert (tries, checkpoints.committed(tmp_path)) == ([2] * 5, [2])


def test_superseded_trainer_commits_nothing(moe_model: Path, world: World, disk: Disk, tmp_path: Path) -> None:
    run = Run(tmp_path, moe_model, world)
    run.train(1, 2)  # is being written
    (tmp_path / "attempts" / "2").mkdir(parents=True)
    disk.free.set()
    with pytest.raises(RankError, match="attempt 2 has taken over the run from attempt 1"):
        run.saver.finish(2, run.train_step, run.timer)
    assert checkpoints.committed(tmp_path) == []
    before = sorted(tmp_path.rglob("*"))
    late = Run(tmp_path, moe_model, world)
    with pytest.raises(RankError, match="attempt 2 has taken over"):
        late.saver.restore(late.train_step)
    with pytest.raises(RankError, match="attempt 2 has taken over"):
        late.train(3, 4)
    assert sorted(tmp_path.rglob("*")) == before

"""Digests of checkpoint shards: damage, storage faults, and kills at any moment."""

from __future__ import annotations

import errno
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.checkpoints import checkpoint, shards
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.distributed.world import RankError, World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.stored import checkpoints
from tests.support.faulty_storage import FaultyStorage, once
from tests.trainer.conftest import finish, make_batch, make_recipe, make_timer, start_ranks


def trained(model: Path, directory: Path, world: World, steps: int, attempt: int = 1) -> tuple[TrainStep, Checkpoints]:
    """Train `steps` steps, each with a checkpoint."""
    recipe = make_recipe(model, max_steps=9, trainer={"optimizer": {"lr": 1e-2}}, checkpoint={"interval": 1, "keep": 3})
    train_step = TrainStep(build(recipe, world), recipe, world)
    saver, timer = Checkpoints(directory, attempt, recipe.checkpoint, world, None), make_timer(directory)
    for step in range(1, steps + 1):
        train_step.train(make_batch(step), timer)
        saver.after(step, train_step, timer)
    return train_step, saver


def weights(train_step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in train_step.policy.model.named_parameters()}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_flipped_bit_in_a_shard_is_detected_during_the_read(moe_model: Path, world: World, tmp_path: Path) -> None:
    first, _ = trained(moe_model, tmp_path, world, 1)
    at_one = weights(first)
    trained(moe_model, tmp_path, world, 2)
    directory = checkpoints.step_dir(tmp_path, 2)
    assert checkpoints.damage(directory) == []
    (shard,) = (directory / "trainer").glob("*.distcp")
    flip(shard)
    assert checkpoints.damage_at_sight(directory) == [], "nobody has read it"
    assert checkpoints.damage(directory) == [f"{shard}: differs from its record"]
    train_step, saver = trained(moe_model, tmp_path, world, 0, attempt=2)
    assert saver.restore(train_step) == 1
    assert (tmp_path / "checkpoints" / "step_000002.damaged-2").is_dir()
    assert [(each.step, each.reason) for each in saver.damaged] == [(2, f"{shard}: differs from its record")]
    assert all(torch.equal(tensor, at_one[name]) for name, tensor in weights(train_step).items())

    (shard,) = (checkpoints.step_dir(tmp_path, 1) / "trainer").glob("*.distcp")
    flip(shard)
    train_step, saver = trained(moe_model, tmp_path, world, 0, attempt=3)
    with pytest.raises(RankError, match="loaded in part"):
        saver.restore(train_step)
    train_step, saver = trained(moe_model, tmp_path, world, 0, attempt=4)
    assert saver.restore(train_step) == 0, "the next attempt is at the beginning"


def test_unreadable_checkpoint_is_not_damaged(
    moe_model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(moe_model, tmp_path, world, 1)

    def fail(*_: Any) -> None:
        raise OSError("stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_read_checked", fail)
        train_step, saver = trained(moe_model, tmp_path, world, 0, attempt=2)
        with pytest.raises(RankError, match="stale file handle"):
            saver.restore(train_step)
    assert checkpoints.committed(tmp_path) == [1]
    assert saver.restore(train_step) == 1


@pytest.mark.parametrize("number", [errno.ESTALE, pytest.param(errno.EIO, marks=pytest.mark.campaign)])
def test_every_storage_call_may_fail_once(number: int, moe_model: Path, world: World, tmp_path: Path) -> None:
    """Includes fsync: a file whose fsync failed is rewritten."""
    with FaultyStorage(tmp_path, once(number)).installed():
        train_step, _ = trained(moe_model, tmp_path, world, 2)
    assert checkpoints.committed(tmp_path) == [1, 2]
    assert checkpoints.damage(checkpoints.step_dir(tmp_path, 2)) == []
    before = weights(train_step)
    with FaultyStorage(tmp_path, once(number)).installed():
        train_step, saver = trained(moe_model, tmp_path, world, 0, attempt=2)
        assert saver.restore(train_step) == 2 and saver.damaged == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(train_step).items())


def test_invisible_checkpoint_ends_the_attempt_and_the_next_resumes_from_it(
    moe_model: Path, world: World, tmp_path: Path
) -> None:
    trained(moe_model, tmp_path, world, 2)
    for attempt, name in enumerate(("step_000002", "trainer", ".metadata", "__0_0.distcp", "COMMITTED"), 2):
        train_step, saver = trained(moe_model, tmp_path, world, 0, attempt)
        with (
            FaultyStorage(tmp_path, hidden={name}).installed(),
            pytest.raises(RankError, match="not visible from this node"),
        ):
            saver.restore(train_step)
    train_step, saver = trained(moe_model, tmp_path, world, 0, attempt=7)
    assert saver.restore(train_step) == 2


def test_stale_shard_is_read_again(
    moe_model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(moe_model, tmp_path, world, 2)
    real, failures = shards._read_checked, [1]

    def stale(path: Path, *arguments: Any) -> None:
        if failures and failures.pop():
            raise shards.DamagedShardError(str(path))
        real(path, *arguments)

    monkeypatch.setattr(shards, "_read_checked", stale)
    train_step, saver = trained(moe_model, tmp_path, world, 0, attempt=2)
    assert saver.restore(train_step) == 2 and saver.damaged == []


def test_restore_reads_each_byte_once(moe_model: Path, world: World, tmp_path: Path) -> None:
    trained(moe_model, tmp_path, world, 1)
    train_step, saver = trained(moe_model, tmp_path, world, 0, attempt=2)
    seen: list[shards.ByteCounter] = []

    class Counted(shards.ByteCounter):
        def __init__(self) -> None:
            super().__init__()
            seen.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "ByteCounter", Counted)
        assert saver.restore(train_step) == 1
    files = (checkpoints.step_dir(tmp_path, 1) / "trainer").glob("*.distcp")
    assert [moved.bytes for moved in seen] == [sum(path.stat().st_size for path in files)]


def test_moments_may_be_stored_in_bfloat16(moe_model: Path, world: World, tmp_path: Path) -> None:
    """Moments on the device, and offloaded moments that are written from a copy."""
    sizes = {}
    for moments, host in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        run_dir = tmp_path / f"{moments}-{host}"
        recipe = make_recipe(
            moe_model,
            trainer={"optimizer": {"lr": 1e-3}, "memory": {"optimizer_state_offload": host}},
            checkpoint={"interval": 1, "moments": moments, "asynchronous": host},
        )
        actual = []
        for attempt in (1, 2):
            train_step = TrainStep(build(recipe, world), recipe, world)
            saver = Checkpoints(run_dir, attempt, recipe.checkpoint, world, None)
            if attempt == 1:
                timer = make_timer(tmp_path)
                train_step.train(make_batch(1), timer)
                saver.finish(1, train_step, timer)
            else:
                assert saver.restore(train_step) == 1
            actual.append((weights(train_step), train_step.optimizer.state_dict()))
        (weights_before, before), (weights_after, after) = actual
        assert all(torch.equal(tensor, weights_after[name]) for name, tensor in weights_before.items())
        rounded = [name for name in before if name.endswith((".exp_avg", ".exp_avg_sq"))]
        assert len(rounded) == 2 * len(weights_before)
        for name, value in before.items():
            if name not in rounded:
                assert bool(value == after[name]), name
                continue
            mine, theirs = value.full_tensor(), after[name].full_tensor()
            assert theirs.dtype == torch.float32
            if moments == "bfloat16":
                assert torch.equal(theirs, mine.bfloat16().float())
                assert bool(((theirs - mine).abs() <= mine.abs() * 2.0**-8 + 2.0**-134).all())
            else:
                assert torch.equal(theirs, mine)
        directory = checkpoints.step_dir(run_dir, 1)
        sizes[moments, host] = sum(path.stat().st_size for path in (directory / "trainer").glob("*.distcp"))
    elements = sum(tensor.numel() for tensor in weights_before.values())
    for host in (False, True):
        saved = sizes["float32", False] - sizes["bfloat16", host]
        assert saved == pytest.approx(2 * 2 * elements, rel=0.02), "two bytes of each moment"


def test_stock_dcp_reads_the_checkpoint(moe_model: Path, world: World, tmp_path: Path) -> None:
    train_step, _ = trained(moe_model, tmp_path, world, 1)
    state = checkpoint._TrainedState(train_step.policy.model).state_dict()
    empty = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    dcp.load({"model": empty}, checkpoint_id=checkpoints.step_dir(tmp_path, 1) / "trainer", no_dist=True)
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in empty.items())


def test_rank_writes_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", 1 << 12)
    state = {f"t{number}": torch.randn(100 + number, 7) for number in range(40)} | {"step": torch.tensor(3.0), "x": 5}
    (tmp_path / "trainer").mkdir()
    writer = shards.ShardWriter(tmp_path / "trainer", shards.ByteCounter(), 4)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert len(writer.files) == 4 and all(record.digest.startswith("xxh3:") for record in writer.files)
    checkpoints.commit(tmp_path, 1, 1, writer.files)
    assert checkpoints.damage(tmp_path) == []
    actual = {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for name, value in state.items()}
    dcp.load(actual, storage_reader=shards.ShardReader(tmp_path / "trainer", shards.ByteCounter(), 4), no_dist=True)
    assert actual["x"] == 5
    assert all(torch.equal(actual[n], v) for n, v in state.items() if isinstance(v, torch.Tensor))


def test_incomplete_files_are_not_committed(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    writer = shards.ShardWriter(tmp_path / "trainer", shards.ByteCounter(), 1)
    dcp.save({"t": torch.ones(8)}, storage_writer=writer, no_dist=True)
    (tmp_path / writer.files[0].name).write_bytes(b"short")
    with pytest.raises(OSError, match="differs from its record"):
        checkpoints.commit(tmp_path, 1, 1, writer.files)
    assert checkpoints.read_commit(tmp_path) is None


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_kills_lose_no_commit(seed: int, tmp_path: Path) -> None:
    rounds, choose, told = 2, random.Random(seed), 0
    for _ in range(rounds):
        words = ("tests.trainer.checkpoints.endless_writes", str(tmp_path), str(told + 1))
        (process,) = start_ranks(1, *words)
        assert process.stdout is not None
        for _ in range(choose.randint(1, 8)):
            told = int(process.stdout.readline())
        for _ in range(choose.randint(0, 200)):
            os.sched_yield()  # somewhere in what follows the commit
        process.send_signal(signal.SIGKILL)
        told = max([told, *map(int, process.stdout.read().split())])
        process.wait()
        committed = checkpoints.committed(tmp_path)
        assert committed and committed[-1] >= told, "a commit is lost"
        assert len(committed) >= min(2, told), "pruned before the next one was committed"
        for step in committed:
            directory = checkpoints.step_dir(tmp_path, step)
            assert checkpoints.damage(directory) == []
            actual = {f"t{number}": torch.zeros(1 << 18) for number in range(8)}
            dcp.load(
                actual, storage_reader=shards.ShardReader(directory / "trainer", shards.ByteCounter(), 2), no_dist=True
            )
            assert all(bool((tensor == step).all()) for tensor in actual.values())
        told = committed[-1]


def test_kills_of_one_of_several_ranks_lose_no_commit(tmp_path: Path) -> None:
    """In each round, one of three ranks is killed at a random byte or file."""
    (output,) = finish(start_ranks(1, "tests.trainer.checkpoints.killed_ranks", str(tmp_path), "1", "5"))
    assert output.count("killed rank") >= 3, output

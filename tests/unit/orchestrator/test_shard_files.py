"""Batch shards as files: written once, and kept until the commit."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import ReferenceType, ref

import numpy as np
import pytest

from primeslurm.orchestrator.algorithms import from_recipe
from primeslurm.orchestrator.batching.batches import Batches, StepShard
from primeslurm.orchestrator.batching.shard_files import ShardFiles
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool, SpooledGroup
from primeslurm.recipe import Recipe
from primeslurm.trainer.loops.rl import Prefetch
from primeslurm.wire.batches import batch_files
from primeslurm.wire.batches.batch import RankShard
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.link.messages import LARGEST_BATCH, Answer, GetBatch, Request
from primeslurm.wire.link.trainer_link import LinkError
from tests.support.batches import received
from tests.support.recipes import recipe_data
from tests.support.waiting import wait_until_async
from tests.unit.orchestrator.test_packing import group
from tests.unit.wire.test_batch_files import empty

RECIPE = Recipe.model_validate(recipe_data())


def batches_of(run: Path) -> Batches:
    spool = Spool(run / "rollouts")
    made = Batches(RECIPE, from_recipe(RECIPE), spool.on_disk)
    for step in (1, 2, 3, 4):
        one = RolloutGroup(f"g-{step}", "reverse-text", step, 0, group([5, 9 + step], [1.0, 0.0]).rollouts)
        spool.put(one)
        made.add(step, [one])
    return made


def files_of(run: Path, batches: Batches) -> ShardFiles:
    return ShardFiles(run, 1, batches, 0, retry_s=0.01)


async def path_of(files: ShardFiles, shard: StepShard, *, unreadable: bool = False) -> Path:
    while True:
        answer = await files.answer(shard, unreadable=unreadable, within_s=60)
        assert answer is not None
        if answer.kind == "file":
            return Path(answer.path)


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[Batches]:
    made = batches_of(tmp_path)
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path, batches: Batches) -> Iterator[ShardFiles]:
    made = files_of(tmp_path, batches)
    yield made
    made.close()


async def test_every_rank_reads_its_own_shard(files: ShardFiles, batches: Batches) -> None:
    shards = [StepShard(4, RankShard(dp, 2, cp, 2)) for dp in range(2) for cp in range(2)]
    sent = {shard: batches.get(shard) for shard in shards}
    paths = await asyncio.gather(*(path_of(files, shard) for shard in shards))
    for shard, path in zip(shards, paths, strict=True):
        frames = sent[shard]
        assert frames is not None
        batch = batch_files.read(path, empty, LARGEST_BATCH)
        assert [*map(bytes, batch.encode())] == [*map(bytes, received(frames).encode())]
        assert batches.encoded(shard) is None, "the shard is dropped from memory"


async def test_shard_is_written_once(files: ShardFiles, tmp_path: Path) -> None:
    shard = StepShard(4, RankShard(0, 2))
    paths = await asyncio.gather(*(path_of(files, shard) for _ in range(5)))
    first = paths[0].stat()
    assert set(paths) == {paths[0]}
    restarted = files_of(tmp_path, Batches(RECIPE, from_recipe(RECIPE)))  # without any group
    assert await path_of(restarted, shard) == paths[0]
    assert await path_of(restarted, shard, unreadable=True) == paths[0], "the file itself is whole"
    assert paths[0].stat().st_ino == first.st_ino
    assert await restarted.answer(StepShard(5, RankShard(0, 2)), unreadable=False, within_s=60) is None
    restarted.close()


async def test_damaged_file_is_rewritten(files: ShardFiles) -> None:
    shard = StepShard(1, RankShard(0, 2))
    path = await path_of(files, shard)
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert await path_of(files, shard) == path, "without a report, the file is not checked"
    assert await path_of(files, shard, unreadable=True) == path
    assert path.read_bytes() == before
    path.unlink()
    assert await path_of(files, shard, unreadable=True) == path and path.read_bytes() == before


async def test_files_stay_until_their_step_is_committed(files: ShardFiles, tmp_path: Path) -> None:
    paths = {step: await path_of(files, StepShard(step, RankShard(0, 1))) for step in (1, 2, 3, 4)}
    old = tmp_path / "batches" / "7" / "step_000009" / "rank_0_of_1.0_of_1"
    old.parent.mkdir(parents=True)
    old.write_text("of another attempt")
    files.committed(2)
    await files.tidy()
    assert {step for step, path in paths.items() if path.exists()} == {3, 4} and not old.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
async def test_write_waits_for_a_full_or_read_only_disk(
    files: ShardFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    full, write = [True], batch_files.write

    def written(path: Path, frames: Sequence[Frame]) -> None:
        if full[0]:
            raise OSError(number, os.strerror(number))
        write(path, frames)

    monkeypatch.setattr(batch_files, "write", written)
    shard = StepShard(4, RankShard(0, 1))
    for _ in range(3):
        assert await files.answer(shard, unreadable=False, within_s=0.05) == Answer("wait")
    await wait_until_async(lambda: caplog.records)
    assert [record.message for record in caplog.records].count(
        f"a shard of the batch of step 4 waits for the file system: [Errno {number}] {os.strerror(number)}"
    ) == 1
    (tmp_path / ".reserve").write_bytes(b"")  # released
    full[0] = False
    assert (await files.answer(shard, unreadable=False, within_s=0.2)) == Answer("wait"), "records come first"
    (tmp_path / ".reserve").unlink()
    assert (await path_of(files, shard)).exists()


async def test_other_disk_faults_are_raised(files: ShardFiles, tmp_path: Path) -> None:
    (tmp_path / "batches").write_text("no directory")
    with pytest.raises(OSError, match="batches"):
        await path_of(files, StepShard(4, RankShard(0, 1)))
    (tmp_path / "batches").unlink()
    assert (await path_of(files, StepShard(4, RankShard(0, 1)))).exists(), "a later request tries again"


def held(batches: Batches) -> set[int]:
    """Return the steps whose rollouts are in memory."""
    return {
        step for step, groups in batches._groups.items() if not all(isinstance(one, SpooledGroup) for one in groups)
    }


def test_uncommitted_steps_can_be_repeated_with_two_in_memory(tmp_path: Path, batches: Batches) -> None:
    batches.get(StepShard(4, RankShard(0, 1)))
    assert held(batches) == {3, 4}
    first = {step: [*map(bytes, batches.get(StepShard(step, RankShard(0, 1))) or [])] for step in (1, 2, 3, 4)}
    assert all(first.values())
    for step in (1, 2, 3, 4, 1):
        assert [*map(bytes, batches.get(StepShard(step, RankShard(0, 1))) or [])] == first[step]
        assert held(batches) <= {3, 4}, "evicted batches stay on disk"
        packed = {key[0] for key in batches._packed}
        assert len(packed) <= 2 and step in packed and {shard.step for shard in batches._encoded} <= packed
    batches.committed(3)
    assert batches.get(StepShard(2, RankShard(0, 1))) is None and batches.get(StepShard(4, RankShard(0, 1))) is not None


async def test_groups_of_a_batch_on_disk_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, routed = Spool(tmp_path / "rollouts"), np.zeros((10, 3, 2), np.uint8)
    for number in range(3):
        (first,), *others = group([5, 9], [1.0, 0.0]).rollouts
        replayed = replace(first, routed_experts=routed[: len(first.token_ids)])
        spool.put(RolloutGroup(f"g-{number}", "reverse-text", number, 0, ((replayed,), *others)))
    restarted = Batches(RECIPE, from_recipe(RECIPE), spool.on_disk)
    restarted.add(1, spool.load())
    read, whole = list[ReferenceType[RolloutGroup]](), SpooledGroup.whole

    def watched(one: SpooledGroup) -> RolloutGroup:
        assert all(before() is None for before in read), "the previous group is still in memory"
        loaded = whole(one)
        read.append(ref(loaded))
        return loaded

    monkeypatch.setattr(SpooledGroup, "whole", watched)
    groups = await restarted.read(1)
    assert len(read) == 3 and held(restarted) == set()
    monkeypatch.undo()
    for mine, one in zip(groups, spool.load(), strict=True):
        for slim, sequence in zip(mine.sequences, one.sequences, strict=True):
            assert slim.routed_experts is None and slim.info == sequence.info
            for name in ("token_ids", "mask", "logprobs", "versions"):
                array = getattr(slim, name)
                assert np.array_equal(array, getattr(sequence, name)) and array.base is None
    (tmp_path / "rollouts" / "g-1.group").write_bytes(b"")
    assert await restarted.read(1) == [] == await restarted.read(2)
    restarted.close()


def test_unreadable_file_is_named_in_the_error(tmp_path: Path) -> None:
    from primeslurm.wire.link import trainer_link
    from tests.unit.wire.test_wire import Server

    class Naming(Server):
        async def answer(self, request: Request) -> Answer:
            self.seen.append(request)
            return Answer("file", path=str(tmp_path / "share"))

    server = Naming()
    client = trainer_link.TrainerLink(server.address)
    with pytest.raises(LinkError, match=r"no batch for step 1 within 0 s; \S+share cannot be read: .*No such file"):
        client.get_batch(1, RankShard(0, 1), timeout_s=0)
    frames = batches_of(tmp_path / "run").get(StepShard(1, RankShard(0, 2)))
    assert frames is not None
    batch_files.write(tmp_path / "share", frames)
    with pytest.raises(LinkError, match="it holds BatchInfo"):
        client.get_batch(2, RankShard(0, 2), timeout_s=0)
    unreadable = [request.unreadable for request in server.seen if isinstance(request, GetBatch)]
    assert client.get_batch(1, RankShard(0, 2), timeout_s=0) is not None and unreadable == [False, False]
    client.close()
    ahead = Prefetch(client, RankShard(0, 2, 0, 1), 60)
    ahead.begin(1)
    assert ahead._fetch is not None
    ahead._fetch._thread.join(60)
    batch = ahead.take(1)
    assert batch is not None and [*map(bytes, batch.encode())] == [*map(bytes, received(frames).encode())]
    assert isinstance(last := server.seen[-1], GetBatch) and last.ahead
    server.stop()

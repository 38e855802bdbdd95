"""Batches whose groups are on disk: routed experts are read only when they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from weakref import ReferenceType, ref

import numpy as np
import pytest

from primeslurm.orchestrator.algorithms import Credit
from primeslurm.orchestrator.algorithms.grpo import Grpo
from primeslurm.orchestrator.batching.batches import Batches, StepShard
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool, SpooledGroup
from primeslurm.recipe import Recipe
from primeslurm.wire.batches import batch_files
from primeslurm.wire.batches.batch import RankShard
from primeslurm.wire.batches.file_ranges import FileRange, FrameSource, StoredArray, loaded
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.link import orchestrator_link, trainer_link
from primeslurm.wire.link.messages import Answer, GetBatch, Request
from tests.support.batches import received
from tests.support.recipes import recipe_data
from tests.unit.orchestrator.test_packing import group
from tests.unit.wire.test_batch_files import empty
from tests.unit.wire.test_wire import Server

RECIPE = Recipe.model_validate(recipe_data())
LAYERS, TOP_K, SHARES = 3, 2, [RankShard(dp, 2, cp, 2) for dp in range(2) for cp in range(2)]


class Looking(Grpo):
    """Assigns credit, and records which sequences had routed experts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        self.seen += [sequence.routed_experts is not None for one in groups for sequence in one.sequences]
        return super().assign(groups)


def with_experts(sequence: Rollout, seed: int) -> Rollout:
    shape = (len(sequence.token_ids), LAYERS, TOP_K)
    return replace(sequence, routed_experts=np.random.default_rng(seed).integers(0, 99, shape, np.uint8))


def example(number: int) -> RolloutGroup:
    """Return a group with one sequence longer than a row, and one without routed experts."""
    made = group([5 + number, 2 * RECIPE.seq_len, 9], [0.0, 1.0, 0.5])
    (first,), (second,), last = made.rollouts
    rollouts = ((with_experts(first, number),), (with_experts(second, 10 + number),), last)
    return RolloutGroup(f"g-{number}", "reverse-text", number, 0, rollouts)


@pytest.fixture
def groups() -> list[RolloutGroup]:
    return [example(number) for number in range(3)]


def batches_of(groups: Sequence[RolloutGroup], algorithm: Grpo | None = None) -> Batches:
    made = Batches(RECIPE, algorithm or Grpo())
    made.add(1, groups)
    return made


@pytest.fixture
def stored(tmp_path: Path, groups: list[RolloutGroup]) -> Iterator[Batches]:
    spool = Spool(tmp_path / "rollouts")
    for one in groups:
        spool.put(one)
    made = batches_of(spool.load())
    yield made
    made.close()


def parts_of(batches: Batches, shard: RankShard) -> list[FrameSource]:
    parts = batches.get(StepShard(1, shard))
    assert parts is not None
    return parts


def test_every_rank_gets_the_same_as_from_memory(stored: Batches, groups: list[RolloutGroup]) -> None:
    memory = batches_of(groups)
    for shard in SHARES:
        mine, expected = parts_of(stored, shard), parts_of(memory, shard)
        assert any(isinstance(part, FileRange) for part in mine), "routed experts stay on disk"
        assert not any(isinstance(part, FileRange) for part in expected)
        assert b"".join(loaded(mine[1:])) == b"".join(expected[1:]) and mine[0] == expected[0]
        assert received(list(loaded(mine))).rows[0].routed_experts is not None
    memory.close()


def test_groups_are_read_once_and_one_at_a_time(stored: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    read, decoded = list[ReferenceType[RolloutGroup]](), SpooledGroup._decoded

    def watched(one: SpooledGroup, data: memoryview) -> RolloutGroup:
        assert all(before() is None for before in read), "the previous group is still in memory"
        loaded = decoded(one, data)
        read.append(ref(loaded))
        return loaded

    monkeypatch.setattr(SpooledGroup, "_decoded", watched)
    for shard in SHARES:
        parts_of(stored, shard)
    assert len(read) == 3
    (packed,) = stored._packed.values()
    documents = [document for rows in packed.rows for row in rows for document in row.documents]
    experts = [document.routed_experts for document in documents if document.routed_experts is not None]
    assert len(experts) == 6 and all(isinstance(each, StoredArray) for each in experts)


async def test_rank_waits_while_a_batch_is_read(stored: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, read = Event(), SpooledGroup._read
    begun = list[SpooledGroup]()

    def held(one: SpooledGroup) -> memoryview:
        begun.append(one)
        assert may_read.wait(60)
        return read(one)

    monkeypatch.setattr(SpooledGroup, "_read", held)
    shards = [StepShard(1, shard) for shard in SHARES]
    for _ in range(3):
        assert [await stored.answer(shard, 0) for shard in shards] == [Answer("wait")] * len(shards)
    may_read.set()
    answers = [await stored.answer(shard, 60) for shard in shards]
    assert answers == [stored.encoded(shard) for shard in shards] and None not in answers
    assert len(begun) == 3, "each of three groups once"


def test_algorithm_sees_the_same_batch_from_disk(tmp_path: Path, groups: list[RolloutGroup]) -> None:
    spool, looking = Spool(tmp_path / "rollouts"), Looking()
    for one in groups:
        spool.put(one)
    for some_groups in (groups, spool.load()):
        batches = batches_of(some_groups, looking)
        parts_of(batches, SHARES[0])
        batches.close()
    assert looking.seen == [False] * 18


class Giving(Server):
    """Serves a batch in chunks of a few bytes."""

    batches: Batches

    async def answer(self, request: Request) -> Sequence[FrameSource] | Answer:
        assert isinstance(request, GetBatch)
        self.seen.append(request)
        return await self.batches.answer(StepShard(request.step, request.shard), 60) or []


@pytest.fixture
def giving(stored: Batches, monkeypatch: pytest.MonkeyPatch) -> Iterator[Giving]:
    monkeypatch.setattr(orchestrator_link, "CHUNK_BYTES", 50)
    made = Giving()
    made.batches = stored
    yield made
    made.stop()


def test_chunk_is_read_on_request(giving: Giving, groups: list[RolloutGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    longest, read = [0], FileRange.read

    def watched(part: FileRange) -> memoryview:
        longest.append(len(part))
        return read(part)

    monkeypatch.setattr(FileRange, "read", watched)
    memory, client = batches_of(groups), trainer_link.TrainerLink(giving.address)
    for shard in SHARES:
        batch = client.get_batch(1, shard, timeout_s=60)
        assert batch is not None
        expected = received([*loaded(parts_of(memory, shard))])
        assert [*map(bytes, batch.encode())] == [*map(bytes, expected.encode())]
    assert 0 < max(longest) <= 50
    client.close()
    memory.close()


def test_truncated_file_is_reported(giving: Giving, tmp_path: Path) -> None:
    for shard in SHARES:
        parts_of(giving.batches, shard)
    for path in (tmp_path / "rollouts").glob("*.group"):
        path.write_bytes(path.read_bytes()[:200])
    client = trainer_link.TrainerLink(giving.address)
    with pytest.raises(trainer_link.LinkError, match=r"DamagedError: \S+\.group ends at \d+, before \d+"):
        client.get_batch(1, SHARES[0], timeout_s=60)
    client.close()


def test_shard_is_written_in_chunks(
    stored: Batches, groups: list[RolloutGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, path = batches_of(groups), tmp_path / "share"
    batch_files.write(path, parts_of(stored, SHARES[0]))
    batch = batch_files.read(path, empty, 1 << 20)
    expected = received([*loaded(parts_of(memory, SHARES[0]))])
    assert [*map(bytes, batch.encode())] == [*map(bytes, expected.encode())]
    memory.close()
    path.unlink()
    parts = parts_of(stored, SHARES[0])
    left, read = [sum(isinstance(part, FileRange) for part in parts) + 1], FileRange.read

    def once(part: FileRange) -> memoryview:
        left[0] -= 1
        return read(part if left[0] else replace(part, path=tmp_path / "gone"))

    monkeypatch.setattr(FileRange, "read", once)
    with pytest.raises(DamagedError, match="No such file"):
        batch_files.write(path, parts)
    assert [one.name for one in tmp_path.iterdir()] == ["rollouts"], "the encoded shard is dropped"


def test_rows_of_a_stored_array(tmp_path: Path) -> None:
    array, path = np.arange(24, dtype=np.uint16).reshape(6, 2, 2), tmp_path / "array"
    path.write_bytes(b"head" + array.tobytes() + b"tail")
    whole = StoredArray(FileRange(path, 4, 4 + array.nbytes), array.dtype, array.shape)
    for start, end in ((0, 6), (2, 4), (3, 99), (5, 5)):
        rows = whole.rows(start, end)
        assert rows.shape == array[start:end].shape and len(rows) == len(array[start:end])
        assert rows.content.read() == array[start:end].tobytes()
    assert whole.content.cut(1, 3).read() == array.tobytes()[1:3] and len(whole.content.cut(40, 99)) == 8

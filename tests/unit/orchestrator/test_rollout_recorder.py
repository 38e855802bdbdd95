"""The archive keeps a sample of rollouts within its limits, and its faults affect nothing else."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from primeslurm.base import durable, files
from primeslurm.base.files import Content
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.transcripts import Credited
from primeslurm.orchestrator.telemetry import rollout_recorder
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.recipe.sections.monitor import KeptRollouts
from primeslurm.records import rollout_files
from primeslurm.run.rollouts.archive import RolloutArchive
from primeslurm.run.rollouts.query import RolloutQuery
from tests.unit.run.test_rollout_archive import rollout


class Steps:
    """The step whose batch is formed next."""

    def __init__(self) -> None:
        self.next = 1

    def __call__(self) -> int:
        return self.next


@pytest.fixture
def steps() -> Steps:
    return Steps()


Make = Callable[..., RolloutRecorder]


@pytest.fixture
def make(tmp_path: Path, steps: Steps) -> Iterator[Make]:
    made = []

    def recorder(attempt: int = 1, **options: object) -> RolloutRecorder:
        made.append(RolloutRecorder(tmp_path, attempt, KeptRollouts.model_validate(options), steps))
        return made[-1]

    yield recorder
    for each in made:
        each.close()


def written(recorder: RolloutRecorder) -> None:
    """Wait until everything that was submitted is on disk or given up."""
    recorder._thread.submit(lambda: None).result(60)


def group(number: int, size: int = 8) -> RolloutGroup:
    name = f"e-{number:08d}"
    return RolloutGroup(name, "e", number, 4, tuple((rollout(i, i / 10, name),) for i in range(size)))


def credits(groups: list[RolloutGroup]) -> list[Credited]:
    return [Credited(one.mask, np.full(8, 0.5, np.float32)) for each in groups for one in each.sequences]


def add_batch(recorder: RolloutRecorder, step: int, count: int = 4) -> None:
    groups = [group(100 * step + number) for number in range(count)]
    recorder.batch(step, groups, credits(groups))
    written(recorder)


def test_sample_of_a_batch_has_some_rollouts_of_a_few_groups(make: Make, tmp_path: Path) -> None:
    recorder = make()
    add_batch(recorder, 1, count=32)
    page = RolloutArchive(tmp_path).page()
    assert page.total == 16 and set(Counter(each.group for each in page.rollouts).values()) == {4}
    assert {(each.state, each.step, each.attempt, each.advantage) for each in page.rollouts} == {("trained", 1, 1, 0.5)}
    assert all(each.example == int(each.group[-8:]) for each in page.rollouts)
    assert recorder.take_metrics() == {"rollouts/archive_kept": 16.0, "rollouts/archive_left_out": 0.0}


def test_small_batch_is_kept_whole(make: Make, tmp_path: Path) -> None:
    add_batch(make(), 1, count=1)
    assert RolloutArchive(tmp_path).page().total == 8


def test_packed_again_the_same_sequences_are_chosen(make: Make) -> None:
    groups = [group(number) for number in range(8)]
    recorder = make()
    first = recorder.batch(1, groups, credits(groups))
    assert len(first) == 16 and recorder.batch(1, groups, credits(groups)) == first
    assert make().batch(1, groups, credits(groups)) == first != make().batch(2, groups, credits(groups))


def test_batch_that_is_packed_again_is_kept_once(make: Make, tmp_path: Path) -> None:
    recorder = make()
    add_batch(recorder, 1)
    add_batch(recorder, 1)
    restarted = make()
    add_batch(restarted, 1)
    assert RolloutArchive(tmp_path).page().total == 16
    add_batch(make(attempt=2), 1)
    assert Counter(each.attempt for each in RolloutArchive(tmp_path).page().rollouts) == {1: 16, 2: 16}


def test_dropped_and_failed_rollouts_are_kept_with_the_reason(make: Make, steps: Steps, tmp_path: Path) -> None:
    recorder = make(per_step=4)
    recorder.dropped(group(1), {f"e-00000001/{i}-abc{i}": "truncated" for i in range(2)})
    recorder.failed("e-00000002/0-x", "ValueError: \ud800", group="e-00000002", environment="e", example=2, task=None)
    add_batch(recorder, 1)
    archive = RolloutArchive(tmp_path)
    dropped = archive.page(RolloutQuery(dropped=True))
    assert [(each.state, each.dropped, each.step) for each in dropped.rollouts] == [("dropped", "truncated", 1)] * 2
    (failed,) = archive.page(RolloutQuery(failed=True)).rollouts
    assert (failed.error, failed.example, failed.reward) == ("ValueError: ?", 2, None)
    assert archive.get(failed.id).conversations == []


def test_steps_that_drop_everything_are_readable_and_bounded(make: Make, steps: Steps, tmp_path: Path) -> None:
    recorder = make(per_step=4)
    for number in range(50):
        made = group(number)
        recorder.dropped(made, {each[0].info.id: "zero_advantage" for each in made.rollouts})
    written(recorder)
    assert RolloutArchive(tmp_path).page().total == 4
    steps.next = 2
    made = group(60)
    recorder.dropped(made, {each[0].info.id: "stale" for each in made.rollouts})
    written(recorder)
    assert [each.step for each in RolloutArchive(tmp_path).page().rollouts] == [2] * 4 + [1] * 4


def test_all_rollouts_of_an_evaluation_are_kept(make: Make, tmp_path: Path) -> None:
    recorder = make(per_step=0)
    for number in range(70):
        name = f"evaluation-5-x/e-{number}"
        recorder.evaluated(5, (rollout(number, 1.0, name),), "", example=number, task=number)
    lost = {"id": "evaluation-5/e-70.0", "group": "evaluation-5/e-70", "environment": "e"}
    recorder.evaluated(5, (), "TimeoutError", example=70, task=70, **lost)
    recorder.flush_evaluation(5)
    add_batch(recorder, 6)
    page = RolloutArchive(tmp_path).page(RolloutQuery(evaluation=True), limit=None)
    assert page.total == 71 and Counter(each.state for each in page.rollouts) == {"evaluated": 70, "failed": 1}
    assert RolloutArchive(tmp_path).page().total == 71


def test_nothing_is_kept_if_the_recipe_says_so(make: Make, tmp_path: Path) -> None:
    recorder = make(per_step=0, evaluations=False)
    add_batch(recorder, 1)
    recorder.dropped(group(1), {"e-00000001/0-abc0": "stale"})
    recorder.failed("x", "error", group="g", environment="e", example=0, task=None)
    recorder.evaluated(5, (rollout(1),), "")
    recorder.flush_evaluation(5)
    written(recorder)
    assert not (tmp_path / "rollouts").exists()


def test_archive_stays_within_its_size_and_evaluations_stay_longest(make: Make, tmp_path: Path) -> None:
    recorder = make()
    add_batch(recorder, 1)
    (path,) = (tmp_path / rollout_files.DIRECTORY).iterdir()
    size = path.stat().st_size
    recorder = make(max_gb=3.5 * size / 1e9)
    recorder.evaluated(1, (rollout(1),), "")
    recorder.flush_evaluation(1)
    for step in range(2, 9):
        add_batch(recorder, step)
    directory = tmp_path / rollout_files.DIRECTORY
    assert sum(each.stat().st_size for each in directory.iterdir()) <= 3.5 * size
    archive = RolloutArchive(tmp_path)
    assert {each.step for each in archive.page(RolloutQuery(evaluation=False)).rollouts} >= {7, 8}
    assert archive.page(RolloutQuery(evaluation=True)).total == 1 and archive.page().problems == []


def test_removed_step_takes_its_log_probabilities_along(make: Make, tmp_path: Path) -> None:
    values = [(number, np.arange(8), np.zeros(8)) for number in range(16)]
    for step in (1, 2, 3):
        add_batch(make(), step)
        path = rollout_files.logprobs_path(tmp_path, step, 1, 3)
        path.write_bytes(rollout_files.encode_logprobs(values))
    size = sum(each.stat().st_size for each in path.parent.iterdir())
    recorder = make(max_gb=size / 1e9)  # a restarted orchestrator finds the archive full
    add_batch(recorder, 4)
    names = sorted(each.name for each in path.parent.iterdir())
    assert names[0].startswith("00000002") and len(names) == 5


def full(path: Path, data: Content) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_full_disk_only_stops_the_archive(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make()
    with monkeypatch.context() as patched:
        patched.setattr(durable, "write", full)
        add_batch(recorder, 1)
    assert recorder.take_metrics() == {"rollouts/archive_kept": 0.0, "rollouts/archive_left_out": 16.0}
    add_batch(recorder, 2)
    assert recorder.take_metrics()["rollouts/archive_kept"] == 16
    assert {each.step for each in RolloutArchive(tmp_path).page().rollouts} == {2}


def test_reserve_of_the_run_is_not_used(make: Make, tmp_path: Path) -> None:
    (tmp_path / files.RESERVE).touch()  # released, because the disk is full
    recorder = make()
    add_batch(recorder, 1)
    assert recorder.take_metrics()["rollouts/archive_left_out"] == 16 and RolloutArchive(tmp_path).page().total == 0


def test_damaged_transcript_costs_only_the_messages(make: Make, tmp_path: Path) -> None:
    recorder = make()
    made = group(1, size=1)
    ((sequence,),) = made.rollouts
    broken = replace(sequence, info=msgspec.structs.replace(sequence.info, transcript=b"broken"))
    made = RolloutGroup(made.id, "e", 1, 4, ((broken,),))
    recorder.batch(1, [made], credits([made]))
    written(recorder)
    (summary,) = RolloutArchive(tmp_path).page().rollouts
    (conversation,) = RolloutArchive(tmp_path).get(summary.id).conversations
    assert conversation.messages == [] and conversation.sequences[0].token_ids == list(range(100, 108))


def test_slow_disk_delays_nobody(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make()
    released = threading.Event()
    write = durable.write

    def slow(path: Path, data: Content) -> None:
        assert released.wait(60)
        write(path, data)

    monkeypatch.setattr(durable, "write", slow)
    for step in range(1, 21):
        groups = [group(step)]
        recorder.batch(step, groups, credits(groups))
    released.set()
    written(recorder)
    row = recorder.take_metrics()
    assert row["rollouts/archive_kept"] == 8 * rollout_recorder.MAX_WAITING
    assert row["rollouts/archive_left_out"] == 8 * (20 - rollout_recorder.MAX_WAITING)


def test_routed_experts_are_not_held(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is written, a kept rollout holds neither routed experts nor the message that it came in."""
    held = []
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda pool, function, *args: held.append(args))
    recorder = make()
    experts = np.zeros((8, 4, 2), np.uint8)
    made = RolloutGroup("e-00000001", "e", 1, 4, ((replace(rollout(0), routed_experts=experts),),))
    recorder.batch(1, [made], credits([made]))
    ((_, _, kept),) = held
    for each in kept:
        for sequence in each.rollout:
            assert sequence.routed_experts is None
            assert all(array.flags.owndata for array in sequence.arrays.values())

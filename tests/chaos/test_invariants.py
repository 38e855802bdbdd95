"""The invariants detect violations."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import pytest

from primeslurm.base.files import write_json
from primeslurm.orchestrator.pipeline.progress import CHECKPOINT_PART, RunProgress
from primeslurm.records.events.training import CheckpointCommitted, CheckpointLoaded, StepTrained
from primeslurm.records.journal import Journal
from primeslurm.records.record import Event
from primeslurm.run.directory import RunDirectory
from primeslurm.wire.stored import checkpoints
from tests.chaos import invariants, spool_watch
from tests.chaos.ports import ports_left
from tests.chaos.spool_watch import SeenGroup, SpoolWatch


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "r")


def attempt(run: RunDirectory, number: int, *written: Event) -> None:
    path = run.attempt(number).path
    path.mkdir(parents=True)
    (path / "plan.json").touch()
    journal = Journal(path, "trainer-rank-0")
    for event in written:
        journal.write(event)


def trained(*steps: int) -> list[Event]:
    return [StepTrained(step) for step in steps]


def commit(run: RunDirectory, step: int, batches: dict[int, list[str]]) -> None:
    directory = checkpoints.step_dir(run.path, step)
    RunProgress(attempt=1, batches=batches).save(directory / CHECKPOINT_PART)
    checkpoints.commit(directory, step, 1)


def test_run_of_two_attempts_violates_nothing(run: RunDirectory) -> None:
    attempt(run, 1, CheckpointLoaded(0), *trained(1, 2), CheckpointCommitted(2), *trained(3))
    attempt(run, 2, CheckpointLoaded(2), *trained(3, 4), CheckpointCommitted(4))
    commit(run, 2, {1: ["a"], 2: ["b"], 3: ["undone"]})
    commit(run, 4, {3: ["c"], 4: ["d"]})
    segments = invariants.segments(run)
    assert invariants.committed_steps_lost(segments) == []
    assert invariants.final_steps(segments) == [1, 2, 3, 4]
    assert invariants.trained_once(segments, 4, records_lost=False) == []
    assert invariants.checkpoints_whole(run, segments, 4) == []
    given = invariants.batches(run)
    assert given == {1: ["a"], 2: ["b"], 3: ["c"], 4: ["d"]} and invariants.groups_once(given, 4) == []


def test_lost_committed_steps_are_reported(run: RunDirectory) -> None:
    attempt(run, 1, CheckpointLoaded(0), *trained(1, 2), CheckpointCommitted(2))
    attempt(run, 2, CheckpointLoaded(0), *trained(1, 2))
    assert invariants.committed_steps_lost(invariants.segments(run)) == [
        "attempt 2 resumed from step 0, but step 2 was committed"
    ]


def test_steps_of_damaged_checkpoints_are_not_lost() -> None:
    def start(attempt: int, loaded: int, *committed: int) -> invariants.Segment:
        return invariants.Segment(attempt, 10.0 * attempt, loaded, committed=list(committed))

    segments = [start(1, 0, 2, 4), start(2, 2, 4, 6), start(3, 4)]
    assert invariants.committed_steps_lost(segments, {1: 4, 2: 6}) == []
    assert len(invariants.committed_steps_lost(segments, {1: 4})) == 1, "the second one had no reason"
    assert len(invariants.committed_steps_lost(segments, {1: 2, 2: 6})) == 1, "it had another one"


def test_repeated_and_missing_steps_are_reported(run: RunDirectory) -> None:
    attempt(run, 1, CheckpointLoaded(0), *trained(1, 2, 2, 4))
    segments = invariants.segments(run)
    missing = "no event says that these steps were trained: [3]"
    assert invariants.trained_once(segments, 4, records_lost=False) == ["step 2 was trained 2 times", missing]
    assert invariants.trained_once(segments, 4, records_lost=True) == ["step 2 was trained 2 times"]


def test_missing_or_damaged_checkpoint_is_reported(run: RunDirectory) -> None:
    attempt(run, 1, CheckpointLoaded(0), *trained(1, 2, 3), CheckpointCommitted(1), CheckpointCommitted(2))
    commit(run, 2, {1: ["a"], 2: ["b"]})
    (checkpoints.step_dir(run.path, 2) / CHECKPOINT_PART).write_bytes(b"")
    gone, last, damaged = invariants.checkpoints_whole(run, invariants.segments(run), 3)
    assert "step 1 is gone" in gone and "step 3 is gone" in last and CHECKPOINT_PART in damaged


def test_group_that_is_trained_twice_is_reported() -> None:
    problems = invariants.groups_once({1: ["a", "b"], 2: ["b"]}, 3)
    assert problems == ["no checkpoint knows the batch of step 3", "group b was trained 2 times"]


def test_missing_or_repeated_metrics_rows_are_reported(run: RunDirectory) -> None:
    run.path.mkdir(parents=True)
    (run.path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 3)))
    assert invariants.metrics_once(run, 3, records_lost=True) == []
    assert invariants.metrics_once(run, 3, records_lost=False) != []
    with (run.path / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 3}\n')
    assert invariants.metrics_once(run, 3, records_lost=True) != []


def group(name: str, newest: int, at: float, gone_at_step: int | None) -> SeenGroup:
    return SeenGroup(name, opened=newest, newest=newest, rollouts=4, seen_at=at, gone_at_step=gone_at_step)


def test_fates_of_finished_rollouts() -> None:
    starts = [invariants.Segment(1, 10.0, 0), invariants.Segment(2, 20.0, 2), invariants.Segment(2, 30.0, 1)]
    seen = [
        group("again", 3, at=11.0, gone_at_step=3),  # undone with step 3
        group("a", 0, at=12.0, gone_at_step=1),
        group("again", 2, at=21.0, gone_at_step=4),
        group("waits", 2, at=22.0, gone_at_step=None),
        group("old", 2, at=23.0, gone_at_step=12),
        group("gone", 2, at=24.0, gone_at_step=4),  # a trainer that restarts within attempt 2 is no excuse
    ]
    fates = invariants.fates(seen, {1: ["a"], 4: ["again"]}, starts, max_off_policy_steps=8)
    assert (fates.trained, fates.spooled, fates.stale, fates.undone, fates.lost) == (8, 4, 4, 4, 4)
    late = SeenGroup("late", opened=3, newest=11, rollouts=4, seen_at=25.0, gone_at_step=10)  # seen before step 11
    assert invariants.fates([late], {}, starts, max_off_policy_steps=8).stale == 4
    young = SeenGroup("young", opened=4, newest=11, rollouts=4, seen_at=25.0, gone_at_step=10)
    assert invariants.fates([young], {}, starts, max_off_policy_steps=8).lost == 4
    assert [problem.split()[2] for problem in fates.problems] == ["gone"]
    seen = [group(name, 1, at=15.0, gone_at_step=step) for name, step in (("kept", 2), ("undone", 4))]
    for each in seen:
        each.gone_at = 19.0
    assert invariants.fates(seen, {}, starts, max_off_policy_steps=8).lost == 8
    fates = invariants.fates(seen, {}, starts, max_off_policy_steps=8, damaged={1: 4})
    assert (fates.undone, [problem.split()[2] for problem in fates.problems]) == (4, ["kept"])


def test_group_may_be_removed_with_an_unrecorded_commit(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unresponsive orchestrator has not reported steps 3 and 4, and their checkpoint is damaged afterwards."""
    monkeypatch.setattr(spool_watch, "_read", lambda path: group(path.stem, 2, at=15.0, gone_at_step=None))
    attempt(run, 1)
    write_json(run.attempt(1).path / "state" / "orchestrator.json", {"step": 2})
    finished = run.path / "rollouts" / "a.group"
    finished.parent.mkdir()
    finished.touch()
    watch = SpoolWatch(run)
    watch._look()
    commit(run, 4, {3: ["a"], 4: ["b"]})
    finished.unlink()
    watch._look()
    (seen,) = watch.seen
    assert seen.gone_at_step == 4
    seen.gone_at = 19.0
    starts = [invariants.Segment(1, 10.0, 0), invariants.Segment(2, 20.0, 2)]
    fates = invariants.fates([seen], {}, starts, max_off_policy_steps=8, damaged={1: 4})
    assert (fates.undone, fates.lost) == (4, 0)


def test_leftover_files_are_reported(run: RunDirectory, tmp_path: Path) -> None:
    run.path.mkdir(parents=True)
    write_json(run.path / "lock.json", {"run_id": "r-left-over"})
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    assert invariants.leftovers(run, tmp) == []
    (tmp / "something").touch()
    assert invariants.leftovers(run, tmp, ["some"]) == []
    with socket.socket(socket.AF_UNIX) as lock:
        lock.bind("\0r-left-over")
        problems = invariants.leftovers(run, tmp)
    assert problems == [f"{tmp}/something was left behind", "socket @r-left-over was left behind"]


def test_open_ports_are_reported(run: RunDirectory) -> None:
    attempt(run, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        addresses = {"hosts": {"engine": "127.0.0.1"}, "ports": {"engine": {"http": port}}}
        run.attempt(1).addresses_file.write_bytes(msgspec.json.encode(addresses))
        assert ports_left(run) == [f"port {port} of 127.0.0.1 is still listened on (engine)"]
    assert ports_left(run) == []

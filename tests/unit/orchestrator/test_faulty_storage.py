"""Temporary failures of the run directory: recovery, the spool, and a whole run."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.base.errors import RunError
from primeslurm.orchestrator.evaluation.results import Archive, EvaluationHeader
from primeslurm.orchestrator.pipeline.progress import CHECKPOINT_PART, PROGRESS, RunProgress, restore
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.wire.stored import checkpoints
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.faulty_storage import FakeTime, FaultyStorage, once
from tests.support.scripted_run import BATCHES, STEPS
from tests.unit.orchestrator.test_end_to_end import FakeRun, finish
from tests.unit.orchestrator.test_packing import group

NUMBERS = pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ESHUTDOWN])


@NUMBERS
def test_recovery_repeats_failed_calls(number: int, tmp_path: Path) -> None:
    directory = checkpoints.step_dir(tmp_path, 2)
    RunProgress(1, 3, 2, cursors={"a": 9}).save(directory / CHECKPOINT_PART)
    checkpoints.commit(directory, 2, 1)
    with FaultyStorage(tmp_path, once(number, number)).installed():
        found = restore(tmp_path, 2)
        found.save(tmp_path / PROGRESS)
    assert (found.cursors, found.committed) == ({"a": 9}, 2)
    with FaultyStorage(tmp_path, once(number, number)).installed():
        assert restore(tmp_path, 2) == found


def test_invisible_checkpoint_is_an_error(tmp_path: Path) -> None:
    for step in (2, 4):
        RunProgress(1, step + 1, step).save(checkpoints.step_dir(tmp_path, step) / CHECKPOINT_PART)
        checkpoints.commit(checkpoints.step_dir(tmp_path, step), step, 1)
    with (
        FaultyStorage(tmp_path, hidden={"step_000004"}).installed(),
        pytest.raises(RunError, match="step 4 is committed"),
    ):
        restore(tmp_path, 2)


@NUMBERS
def test_spool_repeats_failed_calls(number: int, tmp_path: Path) -> None:
    made = group([3, 7], [0.25, 1.0])
    with FaultyStorage(tmp_path, once(number, number)).installed():
        spool = Spool(tmp_path / "rollouts")
        assert spool.put(made) and not spool.waiting
        (again,) = Spool(tmp_path / "rollouts").load()
        assert again.to_bytes() == made.to_bytes()
        spool.delete([made.id])
    assert list((tmp_path / "rollouts").iterdir()) == []


@pytest.mark.parametrize("seconds", [0.01, 20.0])
def test_recorded_group_is_waited_for(seconds: float, tmp_path: Path, storage_time: FakeTime) -> None:
    made = group([3, 7], [0.25, 1.0])
    Spool(tmp_path).put(made)
    storage, until = FaultyStorage(tmp_path), storage_time.now + seconds

    def rule(operation: str, path: str) -> None:
        storage.hidden = {"g.group"} if storage_time.now < until else set()

    storage.fail = rule
    rule("", "")
    with storage.installed():
        spool = Spool(tmp_path)
        assert [each.id for each in spool.load([made.id])] == [made.id]
    assert spool.damaged == {}


def test_incomplete_listing_loses_no_group(tmp_path: Path) -> None:
    Spool(tmp_path).put(group([3, 7], [0.25, 1.0]))
    storage, listings = FaultyStorage(tmp_path), [{"g.group"}]

    def rule(operation: str, path: str) -> None:
        if operation == "listdir":
            storage.hidden = listings.pop() if listings else set()

    storage.fail = rule
    with storage.installed():
        assert [each.id for each in Spool(tmp_path).load()] == ["g"]


def test_unreadable_spool_damages_no_group(tmp_path: Path) -> None:
    Spool(tmp_path).put(group([3, 7], [0.25, 1.0]))
    spool = Spool(tmp_path)
    away = FaultyStorage(tmp_path, lambda operation, path: errno.EIO if path.endswith(".group") else None)
    with away.installed(), pytest.raises(OSError, match="Input/output"):
        spool.load()
    assert spool.damaged == {} and [each.id for each in spool.load()] == ["g"]


@NUMBERS
def test_unfinished_evaluation_is_read_despite_failures(number: int, tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.begin(EvaluationHeader(5, 5, 1.0))
    with (
        FaultyStorage(
            tmp_path, lambda operation, path: number if path.endswith("progress.jsonl") else None
        ).installed(),
        pytest.raises(OSError, match="failures in"),
    ):
        archive.unfinished()
    with FaultyStorage(tmp_path, once(number, number)).installed():
        assert archive.unfinished() == (EvaluationHeader(5, 5, 1.0), [])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    options = {**BATCHES, "rollout_transport": "filesystem"}
    engine = FakeEngine(write_tokenizer(tmp_path / "model"), delay_s=0.05)
    with engine, FakeRun(engine, tmp_path, {"orchestrator": options}) as run:
        run.orchestrator = "tests.support.faulty_orchestrator"
        yield run


def test_run_on_a_faulty_file_system(run: FakeRun) -> None:
    link = run.begin()
    run.train(link, 1)
    run.train(link, 2)
    run.kill("orchestrator")
    run.start("orchestrator")
    finish(run, link, 3)
    faults = run.events("storage_fault")
    assert faults and all(event["recovered"] for event in faults)
    assert run.state()["step"] == STEPS

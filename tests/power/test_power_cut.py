"""After a power cut all acknowledged data exists, and the run resumes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from primeslurm.orchestrator.pipeline.progress import PROGRESS, RunProgress, restore
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.orchestrator.rollouts.transcripts import Credited
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.recipe.sections.monitor import KeptRollouts
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.records.events.training import StepTrained
from primeslurm.records.fleet import Outcome
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import MetricsLog
from primeslurm.run.directory import RunDirectory
from primeslurm.run.rollouts.archive import RolloutArchive
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport import secret
from tests.power.cutter import PARTS, points
from tests.power.disk import OPTIONS, Disk, unavailable

MOMENTS = {"submit": 75, "publish": 100, "commit": 180, "requeue": 18}
"""Lower bounds of the number of writes in each part of a run."""
pytestmark = [
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-"),
    pytest.mark.usefixtures("unmeasured"),
]


@pytest.fixture(params=OPTIONS)
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    """Yield a disk whose power can be cut."""
    made = Disk(tmp_path, request.param)
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine mounts no file system: {error.stderr.decode().strip()}")
    yield made
    made.remove()


def make_secret(run_dir: Path) -> None:
    secret.create(run_dir)


def make_attempt(run_dir: Path) -> None:
    attempt = RunDirectory(run_dir).attempt(1)
    attempt.record_job(JobRecord("7", "slurm", 1.0, None))
    attempt.record_end(EndRecord(Outcome.COMPLETED, "", "", 4, False, "", 1.0))


def make_checkpoint(run_dir: Path) -> None:
    directory = checkpoints.step_dir(run_dir, 2)
    (directory / "trainer").mkdir(parents=True)
    (directory / "trainer" / "weights.bin").write_bytes(bytes(range(256)) * 64)
    RunProgress(1, 3, 2).save(directory / "orchestrator.bin")
    checkpoints.commit(directory, 2, 1)


def make_groups(run_dir: Path) -> None:
    ones = np.ones(64, np.int32)
    rollout = Rollout(RolloutInfo("r", "g", "e", 0, 1.0), ones, ones.astype(bool), ones.astype(np.float32), ones * 0)
    spool = Spool(run_dir / "rollouts")
    assert spool.put(RolloutGroup("a", "e", 0, 0, ((rollout,),)))
    spool.put_all([RolloutGroup(name, "e", 0, 0, ((rollout,),)) for name in "bc"])


def make_kept_rollouts(run_dir: Path) -> None:
    recorder = RolloutRecorder(run_dir, 1, KeptRollouts(), lambda: 1)
    ones = np.ones(64, np.int32)
    rollout = Rollout(RolloutInfo("r", "g", "e", 0, 1.0), ones, ones.astype(bool), ones.astype(np.float32), ones * 0)
    credit = Credited(rollout.mask, rollout.logprobs)
    recorder.batch(1, [RolloutGroup("g", "e", 0, 0, ((rollout,),))], [credit])
    recorder.close()
    recorder._thread.shutdown(wait=True)


def make_progress(run_dir: Path) -> None:
    RunProgress(1, 3, 2).save(run_dir / PROGRESS)
    RunProgress(1, 5, 4).save(run_dir / PROGRESS)


def make_records(run_dir: Path) -> None:
    from primeslurm.records import metrics

    log, journal = MetricsLog(run_dir, 0, tensorboard=False), Journal(run_dir / "attempts" / "1", "trainer")
    log.write(1, {"loss": 0.5})
    journal.write(StepTrained(1))
    metrics.sync(run_dir)
    journal.sync()


MAKES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "the secret": (make_secret, lambda run: len(secret.read(run)) == 64),
    "job and end": (make_attempt, lambda run: (a := RunDirectory(run).attempt(1)).job() and a.end()),
    "a checkpoint": (make_checkpoint, lambda run: checkpoints.damage(checkpoints.step_dir(run, 2)) == []),
    "finished groups": (
        make_groups,
        lambda run: [each.id for each in Spool(run / "rollouts").load()] == ["a", "b", "c"],
    ),
    "kept rollouts": (make_kept_rollouts, lambda run: RolloutArchive(run).get("r").summary.advantage == 1.0),
    "progress": (make_progress, lambda run: restore(run, 1).next_step == 5),
    "metrics": (make_records, lambda run: '"loss": 0.5' in (run / "metrics.jsonl").read_text()),
    "events": (make_records, lambda run: "step" in (run / "attempts/1/events/trainer.jsonl").read_text()),
}


@pytest.mark.parametrize("what", MAKES)
def test_acknowledged_writes_survive_a_power_cut(disk: Disk, what: str) -> None:
    make, is_there = MAKES[what]
    run_dir = disk.path / "runs" / "r"
    run_dir.parent.mkdir()
    if what in ("the secret", "metrics", "events"):
        run_dir.mkdir()  # made by the submission
    disk.flush()
    make(run_dir)
    disk.cut()
    disk.restart()
    assert is_there(run_dir)


def test_disk_loses_unflushed_data(disk: Disk) -> None:
    """Otherwise the tests here would prove nothing."""
    flushed, lost = disk.path / "kept", disk.path / "lost"
    flushed.write_text("kept")
    disk.flush()
    lost.write_text("lost")
    disk.cut()
    with pytest.raises(OSError, match="Input/output"):
        (disk.path / "later").touch()
    disk.restart()
    assert flushed.read_text() == "kept"
    assert not lost.exists() or lost.read_text() != "lost"


def test_disk_is_remounted_while_a_sandbox_has_the_old_mount(disk: Disk) -> None:
    written = disk.path / "written"
    written.write_text("flushed")
    disk.flush()
    with subprocess.Popen(["unshare", "--mount", "sleep", "600"]) as sandbox:
        try:
            namespace = Path("/proc/self/ns/mnt").readlink()
            while Path(f"/proc/{sandbox.pid}/ns/mnt").readlink() == namespace:
                time.sleep(0.01)
            disk.cut()
            disk.restart()
            assert written.read_text() == "flushed"
        finally:
            sandbox.kill()


@pytest.mark.campaign
def test_run_resumes_after_a_power_cut(tmp_path: Path) -> None:
    """Cut the power once during a submission, a published policy, a commit and a requeue."""
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-m", "tests.power.rounds", "--points", "4", "--moments", json.dumps(MOMENTS)]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        argv, cwd=root, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["part"] for each in rounds] == ["submit", "publish", "commit", "requeue"]
    assert all(each["during"] for each in rounds), "a run had ended before its power was cut"


def test_moments_cover_each_part_evenly() -> None:
    moments = {"submit": 40, "publish": 7, "commit": 200, "requeue": 3, "rest": 1000}
    drawn = points(23, moments, random.Random(1))
    assert [part for part, _ in drawn] == [*PARTS * 4, *PARTS[:3]]
    for part, most in moments.items():
        at = sorted(moment for each, moment in drawn if each == part)
        assert 1 <= at[0] <= -(-most // len(at)) and most - most / len(at) < at[-1] <= most

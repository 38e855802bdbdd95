"""Jobs of a real Slurm through submitit: placement, and requeue from within and by preemption."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from primeslurm.base.errors import ClusterError
from primeslurm.plan.model import HetGroup, Plan
from primeslurm.slurm.client import JobState
from primeslurm.slurm.executor import submit
from primeslurm.slurm.render import render
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.cluster.toy import ToyAgent, notes
from tests.support.slurm_plans import group, plan
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster

CHECKOUT = str(Path(__file__).parents[2])
WEIRD = 'it\'s 5 $HOME "x" #1'


def start(cluster: Cluster, given: Plan, *, requeue_itself: bool) -> str:
    script = Path(given.run_dir) / "job.sbatch"
    script.write_text(render(given))
    agent = ToyAgent(Path(given.run_dir), requeue_itself=requeue_itself)
    return submit(given, agent, script, str(cluster.spec.slurm_conf), "toy")


def make(run_dir: Path, *groups: HetGroup, **job: Any) -> Plan:
    return plan(run_dir, *groups, env={"PYTHONPATH": CHECKOUT}, **job)


def wait_for_end(cluster: Cluster, job_id: str) -> JobState:
    def ended() -> bool:
        job = cluster.client.job(job_id)
        assert job is not None
        return not job.active

    wait_until(ended)
    job = cluster.client.job(job_id)
    assert job is not None
    return job


def notes_of(run_dir: Path, what: str) -> list[dict[str, Any]]:
    return [note for note in notes(run_dir) if note["what"] == what]


def test_a_het_job_requeues_itself(cluster: Cluster, run_dir: Path) -> None:
    given = make(run_dir, group(0, "control"), group(1, "train", 2, gpus=2), comment=WEIRD)
    job_id = start(cluster, given, requeue_itself=True)
    job = wait_for_end(cluster, job_id)
    assert (job.state, job.restarts, job.exit_code, len(job.components)) == ("COMPLETED", 1, 0, 2)
    assert [note["rank"] for note in notes_of(run_dir, "checkpoint")] == [0]
    # Slurm notifies the other tasks of the ended attempt, which get its KillWait to end.
    assert {note["rank"] for note in notes_of(run_dir, "TERM")} >= {1, 2}
    starts = notes_of(run_dir, "start")
    assert [note["SLURM_RESTART_COUNT"] for note in starts] == [None] * 3 + ["1"] * 3
    assert {note["job"] for note in starts} == {job_id}
    assert {(note["rank"], note["CUDA_VISIBLE_DEVICES"]) for note in starts} == {(0, None), (1, "0,1"), (2, "0,1")}
    assert {note["SLURMD_NODENAME"][:8] for note in starts} == {"shared-c", "shared-n"}
    assert sorted(note["rank"] for note in notes_of(run_dir, "end")) == [0, 1, 2]
    # Slurm delays a requeue until credentials have expired: by default two minutes, on the embedded cluster seconds.
    assert starts[3]["time"] - notes_of(run_dir, "checkpoint")[0]["time"] < 110
    comment = subprocess.run(
        ["scontrol", "show", "job", "-o", job_id],
        env={"SLURM_CONF": str(cluster.spec.slurm_conf), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"Comment={WEIRD}" in comment.stdout


def test_preemption_checkpoints_and_requeues(cluster: Cluster, run_dir: Path, tmp_path: Path) -> None:
    """An urgent job takes all nodes. Our job gets SIGUSR2, writes a checkpoint, and resumes later."""
    job_id = start(cluster, make(run_dir, group(0, "all", 2, gpus=2)), requeue_itself=False)
    wait_until(lambda: len(notes_of(run_dir, "start")) == 2)
    subprocess.run(
        ["sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"],
        env={"SLURM_CONF": str(cluster.spec.slurm_conf), "PATH": "/usr/bin:/bin"},
        check=True,
    )
    job = wait_for_end(cluster, job_id)
    assert (job.state, job.restarts) == ("COMPLETED", 1)
    assert sorted(note["rank"] for note in notes_of(run_dir, "USR2")) == [0, 1]
    assert [note["rank"] for note in notes_of(run_dir, "checkpoint")] == [0]
    assert sorted(note["rank"] for note in notes_of(run_dir, "end")) == [0, 1]


def test_cancel(cluster: Cluster, run_dir: Path) -> None:
    given = make(run_dir, group(0, "control"), group(1, "train", 1, gpus=1))
    job_id = start(cluster, given, requeue_itself=False)
    wait_until(lambda: len(notes_of(run_dir, "start")) == 2)
    cluster.client.cancel(job_id)
    job = wait_for_end(cluster, job_id)
    assert (job.state, job.restarts) == ("CANCELLED", 0)
    assert notes_of(run_dir, "checkpoint") == []


def test_sbatch_refuses(cluster: Cluster, run_dir: Path) -> None:
    with pytest.raises(ClusterError, match="invalid partition specified: nowhere"):
        start(cluster, make(run_dir, group(0, "all", 1, partition="nowhere")), requeue_itself=False)

"""Submission from within an allocation of the same Slurm, with variables that change its commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from primeslurm.slurm.executor import submit
from primeslurm.slurm.render import render
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.cluster.test_requeue import make, wait_for_end
from tests.cluster.toy import EnvironmentNote
from tests.support.slurm_plans import group

pytestmark = pytest.mark.cluster

HABITS = {
    "SRUN_CPUS_PER_TASK": "32",
    "SLURM_GPUS": "5",
    "SLURM_GPUS_PER_TASK": "5",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_ARRAY_JOB_ID": "5",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_RESTART_COUNT": "3",
    "SLURM_NTASKS": "7",
    "SBATCH_PARTITION": "nowhere",
    "SINFO_PARTITION": "cpu",
    "SQUEUE_PARTITION": "cpu",
    "SLURM_CLUSTERS": "nowhere",
}


def test_submission_from_an_allocation_ignores_its_variables(
    cluster: Cluster, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = str(cluster.spec.slurm_conf)
    argv = ["salloc", "--quiet", "--partition=gpu", "--ntasks=1", "--mem-per-cpu=100", "--gres=gpu:1", "env", "-0"]
    done = subprocess.run(argv, env={**os.environ, "SLURM_CONF": conf}, capture_output=True, text=True, check=True)
    allocation = dict(line.split("=", 1) for line in done.stdout.split("\0") if line.startswith("SLURM_"))
    assert allocation["SLURM_MEM_PER_CPU"] == "100"
    for name, value in (allocation | HABITS).items():
        monkeypatch.setenv(name, value)

    assert set(cluster.client.partitions()) == {"cpu", "gpu", "urgent"}
    given = make(run_dir, group(0, "control", mem="100M"), group(1, "train", 2, gpus=2, mem="100M"))
    script = run_dir / "job.sbatch"
    script.write_text(render(given))
    job_id = submit(given, EnvironmentNote(run_dir), script, conf, "environment")
    job = wait_for_end(cluster, job_id)
    assert (job.state, job.exit_code, len(job.components)) == ("COMPLETED", 0, 2)
    inside = EnvironmentNote.read(run_dir)
    assert [each["SLURM_JOB_ID"] for each in inside] == [job_id] * 3
    assert {each.get("SLURM_RESTART_COUNT") for each in inside} == {None}
    assert {name for each in inside for name in each} & (HABITS.keys() - {"SLURM_NTASKS"}) == set()
    assert {each["SLURM_NTASKS"] for each in inside} == {"3"}

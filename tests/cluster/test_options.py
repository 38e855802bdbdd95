"""Job options reach a real sbatch unchanged."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from primeslurm.plan.model import Plan
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.render import render
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.support.slurm_plans import group, plan
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster

COMMENTS = [
    'it\'s "5" $HOME `id` $(id) \\ \\\\x #1 ! ; | &',
    "ünïcode 日本 🚀",
    "%j %% a=b : -x --partition=cpu ",
    "x" * 1000,
]


class Sbatch:
    """Submits scripts of plans to a cluster, and cancels the jobs at the end."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._environment = {**os.environ, "SLURM_CONF": str(cluster.spec.directory / "slurm.conf")}
        self._client = SlurmClient(str(cluster.spec.directory / "slurm.conf"))
        self._script = directory / "job.sbatch"
        self._jobs: list[str] = []

    def __call__(self, given: Plan) -> str:
        self._script.write_text(render(given))
        argv = ["sbatch", "--parsable", str(self._script)]
        done = subprocess.run(argv, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._jobs.append(done.stdout.strip())
        return self._jobs[-1]

    def show(self, job: str) -> list[dict[str, Any]]:
        """Return the components of a job, from squeue."""
        argv = ["squeue", "--json"]  # with --json squeue ignores --jobs
        done = subprocess.run(argv, env=self._environment, capture_output=True, text=True, check=True)
        rows = [dict(row) for row in json.loads(done.stdout)["jobs"]]
        mine = [row for row in rows if job in (str(row["job_id"]), str(row["het_job_id"]))]
        return sorted(mine, key=lambda row: int(row["job_id"]))

    def wait_until_done(self, job: str) -> None:
        wait_until(lambda: (state := self._client.job(job)) is None or not state.active, lambda: self._client.job(job))

    def cancel_all(self) -> None:
        for job in self._jobs:
            subprocess.run(["scancel", job], env=self._environment, capture_output=True, check=False)


@pytest.fixture
def sbatch(cluster: Cluster, tmp_path: Path) -> Iterator[Sbatch]:
    commands = Sbatch(cluster, tmp_path)
    yield commands
    commands.cancel_all()


@pytest.mark.parametrize("comment", COMMENTS)
def test_a_comment_arrives_unchanged(sbatch: Sbatch, run_dir: Path, comment: str) -> None:
    job = sbatch(plan(run_dir, group(0, "all", gpus=1), comment=comment, extra=("--hold",)))
    assert [row["comment"] for row in sbatch.show(job)] == [comment]


def test_every_job_option_reaches_slurm(sbatch: Sbatch, run_dir: Path, cluster: Cluster) -> None:
    first, second, *_ = (node.name for node in SlurmClient(str(cluster.spec.directory / "slurm.conf")).nodes())
    given = plan(
        run_dir,
        group(0, "control", mem="100M"),
        group(1, "train", gpus=1, mem="200M", switches="1@00:10:00", exclusive=True),
        time_min="00:30:00",
        exclude=f"{first},{second}",
        dependency="singleton",
        mail_user="someone@example.com",
        mail_types=("FAIL", "TIME_LIMIT_90"),
        nice=7,
        comment="a b",
        extra=("--hold", "--wckey=x y"),
    )
    control, train = sbatch.show(sbatch(given))
    for row in (control, train):
        assert (row["time_limit"], row["time_minimum"], row["nice"]) == (60, 30, 7)
        assert row["standard_output"] == f"{given.run_dir}/slurm-%j.out"
        assert row["requeue"] is True
        assert row["wckey"] == "x y"
        assert row["comment"] == "a b"
        assert row["dependency"].startswith("singleton")
    assert (control["partition"], control["name"]) == ("cpu", "demo")
    assert (train["partition"], train["name"]) == ("gpu", "demo/train")


def test_singleton_het_jobs_run_one_after_another(sbatch: Sbatch, run_dir: Path) -> None:
    """Slurm would make components of one name wait for each other, so they have different names."""
    given = plan(run_dir, group(0, "control"), group(1, "train", gpus=1), dependency="singleton").model_copy(
        update={"python": "true"}
    )
    for job in [sbatch(given), sbatch(given)]:
        sbatch.wait_until_done(job)


def test_output_reaches_a_directory_with_special_characters(sbatch: Sbatch, tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s 100% %j "x" $y'
    odd.mkdir()
    job = sbatch(plan(odd, group(0, "all"), prologue=("echo here",)).model_copy(update={"python": "true"}))
    sbatch.wait_until_done(job)
    assert "here" in (odd / f"slurm-{job}.out").read_text()

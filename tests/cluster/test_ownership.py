"""One job per run on a real Slurm: two concurrent resumes, a killed sbatch, a second job by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from primeslurm.api.runs.run import Run
from primeslurm.base.errors import UsageError
from primeslurm.base.files import write_json
from primeslurm.plan.model import JobOptions, Node, Plan, Process, Totals
from primeslurm.recipe.site import Site
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.run.directory import RunDirectory
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.support.plans import python
from tests.support.slurm_plans import group
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster
CHECKOUT = str(Path(__file__).parents[2])
UNTIL_DONE = python("import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.1)", "${run_dir}/done")


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path) -> Run:
    """Yield a run of one node whose only attempt has failed. The next one succeeds once the test allows it."""
    directory = RunDirectory(tmp_path / "runs" / "owned")
    site = Site.model_validate(yaml.safe_load(cluster.spec.site_file.read_text()))
    trainer = Process.model_validate(
        {"name": "trainer-rank-0", "role": "trainer", "node": 0, "argv": UNTIL_DONE, "log": "t.log"}
    )
    plan = Plan(
        schema=1,
        run="owned",
        run_dir=str(directory.path),
        task="sft",
        layout="single",
        executor="slurm",
        device="cpu",
        python=sys.executable,
        job=JobOptions(name="owned", time="00:10:00", signal_s=40),
        groups=(group(0, "train", gpus=1),),
        nodes=(Node(index=0, group=0, role="train", index_in_group=0, processes=(trainer,)),),
        replicas=(),
        totals=Totals(nodes=1, gpus=0, trainer_gpus=0, engines=0, inference_nodes=0, routers=0),
        env={"TMPDIR": "${tmp}", "PYTHONPATH": CHECKOUT},
        addresses=site.network.addresses,
        stall_timeout_s=600,
        max_attempts=9,
    )
    attempt = directory.attempt(1)
    attempt.prepare(plan)
    attempt.record_job(JobRecord("999999", "slurm", 1.0, str(cluster.spec.slurm_conf), "first"))
    attempt.record_end(EndRecord("failed", "a node was lost", "", None, False, "", 2.0))
    write_json(directory.path / "lock.json", {"run_id": "owned-1", "created_at": 1.0})
    return Run(directory.path)


def resume(run: Run, path: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "primeslurm", "resume", str(run.path)]
    env = {**os.environ, "PYTHONPATH": CHECKOUT, "PATH": path}
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_run_has_only_one_job(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    real = os.environ["PATH"]
    late = tmp_path / "bin" / "sbatch"
    late.parent.mkdir()
    waits = f"while [ ! -e {run.path}/done ]; do sleep 0.1; done"
    late.write_text(f'#!/bin/sh\nPATH="{real}"\nsbatch "$@" && touch {tmp_path}/taken\n{waits}\n')
    late.chmod(0o755)

    # Two resumes, both with an sbatch that hangs after Slurm has the job. Then the first one is killed.
    both = [resume(run, f"{late.parent}:{real}") for _ in range(2)]
    wait_until(lambda: any(process.poll() is not None for process in both))
    (loser,) = [process for process in both if process.poll() is not None]
    (winner,) = [process for process in both if process is not loser]
    assert loser.wait() == 2
    assert (
        loser.stderr is not None
        and "nothing to resume, " in (message := loser.stderr.read())
        and "attempt 2" in message
    )
    wait_until((tmp_path / "taken").exists)
    winner.kill()
    winner.communicate()

    # The job is found. It starts although nobody was told its id.
    status = run.status()
    job_id = status.job_id
    assert job_id is not None and status.attempt == 2 and status.active
    with pytest.raises(UsageError, match=rf"slurm job {job_id} \(attempt 2, submitted from"):
        run.start_again()
    wait_until(lambda: run.status().phase == "running")

    # a second job of the same submission ends without a trace
    job = run.directory.attempt(2).job()
    assert job is not None
    argv = ["sbatch", "--parsable", str(run.path / "attempts/2/job.sbatch"), job.submission]
    env = {**os.environ, "SLURM_CONF": str(cluster.spec.slurm_conf)}
    second = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()

    def ended() -> bool:
        state = cluster.client.job(second)
        return state is not None and not state.active

    wait_until(ended)
    assert (state := cluster.client.job(second)) is not None and (state.state, state.exit_code) == ("FAILED", 4)
    output = run.directory.job_output(second).read_text()
    assert f"belongs to slurm job {job_id} (attempt 2" in output and "ends without touching it" in output
    assert run.status().phase == "running" and run.status().job_id == job_id
    assert [attempt.number for attempt in run.directory.attempts()] == [1, 2]

    (run.path / "done").touch()
    assert run.wait().phase == "completed"
    wait_until(lambda: not {job_id, second} & set(cluster.client.job_ids()))

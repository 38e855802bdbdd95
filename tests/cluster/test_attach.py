"""`primeslurm attach` into a heterogeneous job with real agents."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from primeslurm.base.files import write_json
from primeslurm.node.entry import AgentTask
from primeslurm.plan.model import Process
from primeslurm.records.attempt import JobRecord
from primeslurm.run.directory import RunDirectory
from primeslurm.slurm.executor import submit
from primeslurm.slurm.render import render
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.support.cli import Result, primeslurm
from tests.support.plans import python
from tests.support.slurm_plans import group, plan
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster
CHECKOUT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDirectory]:
    """Yield a run with a node without GPUs that runs nothing, and a node whose trainer sleeps."""
    directory = RunDirectory(tmp_path_factory.mktemp("runs") / "attached")
    directory.path.mkdir()
    given = plan(directory.path, group(0, "control"), group(1, "train", gpus=2), env={"PYTHONPATH": CHECKOUT})
    sleeper = Process(
        name="trainer-rank-0",
        role="trainer",
        node=1,
        argv=python("import time; time.sleep(600)"),
        env={"RANK": "0", "WHERE": "${host}"},
        log="logs/trainer/trainer-rank-0.log",
        gpus=(1,),
    )
    nodes = (given.nodes[0], given.nodes[1].model_copy(update={"processes": (sleeper,)}))
    addresses = yaml.safe_load((cluster.spec.directory / "site.yaml").read_text())["network"]["addresses"]
    given = given.model_copy(update={"nodes": nodes, "addresses": addresses, "python": sys.executable})
    attempt = directory.attempt(1)
    attempt.prepare(given)
    write_json(directory.path / "lock.json", {"run_id": "attached-1", "created_at": time.time()})
    script = attempt.path / "job.sbatch"
    script.write_text(render(given))
    slurm_conf = str(cluster.spec.slurm_conf)
    attempt.record_job(JobRecord("", "slurm", time.time(), slurm_conf, "attached"))
    job_id = submit(given, AgentTask(given.run_dir, 1, "attached"), script, slurm_conf, "attached")
    attempt.record_job(JobRecord(job_id, "slurm", time.time(), slurm_conf, "attached"))
    wait_until(
        lambda: '"trainer-rank-0": "HEALTHY"' in read(attempt.fleet_file),
        lambda: read(directory.path / f"slurm-{job_id}.out"),
    )
    yield directory
    cluster.client.cancel(job_id)


def read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def attach(run: RunDirectory, target: str, *command: str) -> Result:
    return primeslurm("attach", run.path, target, "--", *command, cwd=run.path.parent)


def test_attached_command_gets_the_environment_of_a_process(run: RunDirectory) -> None:
    script = 'echo "$SLURMD_NODENAME $RANK $WHERE $CUDA_VISIBLE_DEVICES $PWD"; exit 7'
    result = attach(run, "trainer", "bash", "-c", script)
    report = run.latest().agent_file(1)
    name, address = (yaml.safe_load(report.read_text())[key] for key in ("name", "address"))
    assert result.code == 7, result.err
    assert result.out == f"{name} 0 {address} 1 {run.path}\n"
    assert f"trainer-rank-0 on {name}" in result.err


def test_attach_accepts_node_name_or_number(run: RunDirectory) -> None:
    by_number = attach(run, "0", "printenv", "SLURMD_NODENAME")
    assert by_number.code == 0, by_number.err
    name = by_number.out.strip()
    assert name.startswith("shared-c")
    assert attach(run, name, "printenv", "SLURMD_NODENAME").out == f"{name}\n"


def test_missing_command_exits_with_127(run: RunDirectory) -> None:
    assert attach(run, "trainer", "no-such-command").code == 127


def test_unknown_attach_target_is_named(run: RunDirectory) -> None:
    result = attach(run, "trainr", "true")
    assert result.code == 2
    assert result.err == "error: TARGET = trainr: is not a role, process or node of this run (did you mean trainer?)\n"

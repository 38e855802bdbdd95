"""Limits, access and reservations of a real Slurm: refused before submission, and reported while a job waits."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.api.runs.run import Run, find_run
from primeslurm.base.hostlists import compress
from primeslurm.records.attempt import Obstacle
from primeslurm.testbed.embedded_slurm.cluster import Cluster, up
from primeslurm.testbed.embedded_slurm.config import ClusterSpec
from tests.support.cli import Result, primeslurm
from tests.support.recipes import model_dir, recipe_data
from tests.support.slurm import require_slurm
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield two GPU nodes in partitions with limits."""
    require_slurm()
    root = tmp_path_factory.mktemp("limits")
    spec = ClusterSpec("limits", root / "c", root / "runs", nodes=2, gpus_per_node=2, cpus_per_node=8)
    cluster, _ = up(spec)
    nodes = ",".join(spec.gpu_names)
    with spec.slurm_conf.open("a") as conf:
        conf.write(f"PartitionName=debug Nodes={nodes} MaxTime=00:30:00 State=UP\n")
        conf.write(f"PartitionName=secret Nodes={nodes} Hidden=YES AllowGroups=nogroup MaxNodes=1 State=UP\n")
        conf.write(f"PartitionName=closed Nodes={nodes} State=DOWN\n")
    try:
        command(cluster, "scontrol", "reconfigure")
        yield cluster
    finally:
        cluster.down()


def command(cluster: Cluster, *argv: str) -> str:
    env = {**os.environ, "SLURM_CONF": str(cluster.spec.slurm_conf)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


def place(cluster: Cluster, directory: Path, partition: str, kind: dict[str, Any], **recipe: Any) -> None:
    """Write a recipe, and a site whose GPU nodes are in a partition."""
    site = yaml.safe_load((cluster.spec.directory / "site.yaml").read_text()) | {"runs": str(directory / "runs")}
    for role in site["nodes"]:
        if site["nodes"][role]["partition"] == "gpu":
            site["nodes"][role] |= {"partition": partition, **kind}
    (directory / "site.yaml").write_text(yaml.safe_dump(site))
    (directory / "r.yaml").write_text(
        yaml.safe_dump(recipe_data(name="waits", model={"path": str(model_dir(directory))}, **recipe))
    )


def errors(result: Result) -> list[str]:
    """Return the errors of `check`."""
    return [line.removeprefix("error: ") for line in result.err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("partition", "kind", "recipe", "expected"),
    [
        (
            "debug",
            {"gpus": 8, "cpus": 32, "gres": "gpu:h200", "mem": "1000G"},
            {"slurm": {"time": "05:00:00", "reservation": "lab"}},
            [
                "slurm.reservation = lab: no such reservation",
                "slurm.train.cpus_per_task = 32: nodes of partition debug have at most 8 CPU cores",
                "slurm.train.mem = 1024000M: nodes of partition debug have at most",
                "site: nodes.train.gres = gpu:h200: nodes of partition debug have gpu",
                'slurm.time = 05:00:00: partition debug allows 00:30:00 (nearest: "00:30:00")',
            ],
        ),
        (
            "secret",
            {},
            {"deployment": {"train": {"nodes": 2}}},
            ["deployment.train.nodes = 2 nodes: partition secret gives a job at most 1"],
        ),
        ("closed", {}, {}, ["slurm.train.partition = closed: is down, so it starts no jobs"]),
    ],
)
def test_job_that_cannot_start_is_refused_with_all_problems(
    limited: Cluster, tmp_path: Path, partition: str, kind: dict[str, Any], recipe: dict[str, Any], expected: list[str]
) -> None:
    place(limited, tmp_path, partition, kind, **recipe)
    result = primeslurm("check", "r.yaml", "--site", "site.yaml", cwd=tmp_path)
    problems = errors(result)
    assert result.code == 2 and len(problems) == len(expected), result.err
    for text, beginning in zip(problems, expected, strict=True):
        assert text.startswith(beginning)
    refused = primeslurm("submit", "r.yaml", "--site", "site.yaml", cwd=tmp_path)
    assert refused.code == 2 and expected[-1].partition(" =")[0] in refused.err
    assert not (tmp_path / "runs").exists()


def test_sbatch_tests_the_job_first(limited: Cluster, tmp_path: Path) -> None:
    place(limited, tmp_path, "gpu", {}, slurm={"extra": ["--no-such-option"]})
    result = primeslurm("check", "r.yaml", "--site", "site.yaml", cwd=tmp_path)
    (refusal,) = errors(result)
    assert result.code == 2
    assert refusal.startswith("slurm: sbatch would refuse the job: ") and "no-such-option" in refusal


def until(run: Run, condition: Callable[[list[Obstacle]], bool]) -> list[Obstacle]:
    return wait_until(lambda: obstacles if condition(obstacles := run.status().obstacles) else None)


def test_pending_job_reports_the_reason_of_each_component(limited: Cluster, tmp_path: Path) -> None:
    place(limited, tmp_path, "debug", {}, slurm={"time": "00:20:00"})
    site = yaml.safe_load((tmp_path / "site.yaml").read_text())
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site | {"slurm": {"extra": ["--hold"]}}))
    submitted = primeslurm("submit", "r.yaml", "--emulate", "--site", "site.yaml", cwd=tmp_path)
    assert submitted.code == 0, submitted.err
    run = find_run("waits", tmp_path / "runs")
    status = run.status()
    assert (status.phase, status.reason) == ("pending", "PENDING (JobHeldUser)")
    (held,) = status.obstacles
    assert (
        held.component == "control, train, inference"
        and held.fix == f"`scontrol release {status.job_id}` lets it start"
    )

    command(limited, "scontrol", "update", "partitionname=debug", "maxtime=5")
    for component in limited.client.job(str(status.job_id)).components:  # type: ignore[union-attr]
        command(limited, "scontrol", "release", component.job_id)
    (limit,) = until(run, lambda obstacles: [each.reason for each in obstacles] == ["PartitionTimeLimit"])
    assert (limit.component, limit.never) == ("train, inference", True)
    assert "train, inference: PartitionTimeLimit" in run.status().reason
    shown = primeslurm("status", "waits", "--runs", "runs", cwd=tmp_path)
    assert "error: train, inference cannot start: asks for more time than its partition allows" in shown.out
    answer = json.loads(primeslurm("status", "waits", "--runs", "runs", "--json", cwd=tmp_path).out)
    assert [each["reason"] for each in answer["obstacles"]] == ["PartitionTimeLimit"]
    doctor = primeslurm("doctor", "waits", "--runs", "runs", "--json", cwd=tmp_path)
    first = json.loads(doctor.out)["first"]
    assert doctor.code == 1 and first["failure"]["component"] == "component train, inference"
    assert first["causes"][0]["fix"] == "set a shorter slurm.time and resume"

    assert run.cancel()
    command(limited, "scontrol", "update", "partitionname=debug", "maxtime=30")


def test_job_waiting_for_maintenance_names_the_reservation(limited: Cluster, tmp_path: Path) -> None:
    nodes = limited.spec.gpu_names
    command(
        limited, "scontrol", "create", "reservation", "reservationname=maint1", "starttime=now+5minutes", "duration=60",
        "flags=maint,ignore_jobs", f"nodes={','.join(nodes)}", "users=daemon",
    )  # fmt: skip
    try:
        place(limited, tmp_path, "debug", {}, slurm={"time": "00:20:00"})
        submitted = primeslurm("submit", "r.yaml", "--emulate", "--site", "site.yaml", cwd=tmp_path)
        assert submitted.code == 0, submitted.err
        run = find_run("waits", tmp_path / "runs")
        (closed,) = until(run, lambda obstacles: any("maintenance" in each.reason for each in obstacles))
        assert closed.component == "train, inference" and not closed.never
        assert closed.text.startswith(f"cannot end before maintenance maint1 of {compress(nodes)}, from 20")
        assert run.cancel()
        command(limited, "scontrol", "update", "reservationname=maint1", "starttime=now")
        wait_until(lambda: limited.client.nodes_by_partition(["gpu"]) == {"gpu": dict.fromkeys(nodes, False)})
        assert limited.client.nodes_by_partition(["gpu"], "maint1") == {"gpu": dict.fromkeys(nodes, True)}
    finally:
        command(limited, "scontrol", "delete", "reservationname=maint1")

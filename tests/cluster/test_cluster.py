"""Embedded clusters: two beside each other, and what remains after `down`."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from primeslurm.base.errors import ClusterError, UsageError
from primeslurm.base.hostlists import compress, expand
from primeslurm.recipe.site import Site
from primeslurm.slurm.client import SlurmClient
from primeslurm.testbed.embedded_slurm import cluster as cluster_module
from primeslurm.testbed.embedded_slurm.cluster import Cluster, up
from primeslurm.testbed.embedded_slurm.config import ClusterSpec
from primeslurm.testbed.embedded_slurm.daemons import job_processes
from tests.support.kernels import merges_pages
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster
NO_RANDOM_ADDRESSES = 0x0040000


def processes_naming(directory: Path) -> list[str]:
    """Return command lines of other processes whose command line or environment names a directory."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in text:
            lines.append(f"{process.name} {text[:200]!r}")
    return lines


def test_everything_is_up(cluster: Cluster) -> None:
    status = cluster.status()
    assert status.up
    assert len(status.daemons) == 2 + 5
    assert set(status.nodes) == {f"shared-n00{i}" for i in range(1, 5)} | {"shared-c001"}
    partitions = cluster.client.partitions()
    assert {name: (len(p.nodes), p.nodes[0].gres, p.state) for name, p in partitions.items()} == {
        "gpu": (4, "gpu:2", "UP"),
        "urgent": (4, "gpu:2", "UP"),
        "cpu": (1, "", "UP"),
    }
    site = Site.model_validate(yaml.safe_load(cluster.spec.site_file.read_text()))
    assert set(site.network.addresses) == set(status.nodes)
    assert not cluster.spec.runs.exists()


def test_up_of_a_running_cluster_changes_nothing(cluster: Cluster) -> None:
    again, started = up(cluster.spec)
    assert not started
    assert again.daemons == cluster.daemons
    with pytest.raises(UsageError, match="other settings"):
        up(replace(cluster.spec, nodes=3))


def hostnames(cluster: Cluster, hostlist: str) -> list[str]:
    """Expand a host list with Slurm's own command."""
    environment = {**os.environ, "SLURM_CONF": str(cluster.spec.slurm_conf)}
    argv = ["scontrol", "show", "hostnames", hostlist]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("hostlist", ["shared-n[001-003,007],x1", "r[1-2]c[01-02]", "a,b", "n[9-11]", "n[3,1]"])
def test_expand_agrees_with_slurm(cluster: Cluster, hostlist: str) -> None:
    assert expand(hostlist) == hostnames(cluster, hostlist)


def test_slurm_understands_compress(cluster: Cluster) -> None:
    names = [f"n{i:03d}" for i in (1, 2, 3, 7)] + ["x1", "n009", "n010", "y"]
    assert hostnames(cluster, compress(names)) == names


def test_unknown_job(cluster: Cluster) -> None:
    assert cluster.client.job("999999") is None
    with pytest.raises(ClusterError, match="Invalid job id"):
        cluster.client.requeue("999999")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a directory with a short path, as Slurm's Unix sockets need."""
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        yield Path(directory)


def test_directory_without_a_cluster_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no embedded cluster"):
        Cluster.load(tmp_path)


def test_nonempty_directory_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(UsageError, match="not empty"):
        up(ClusterSpec("other", tmp_path, tmp_path / "runs"))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt-get install slurm-wlm munge"):
        up(ClusterSpec("other", tmp_path / "c", tmp_path / "runs"))


def test_failed_daemon_start_reports_its_log(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the probe, the second controller would get the first one's ports."""
    monkeypatch.setattr(cluster_module, "_free_place", lambda _: cluster.place)
    directory = tmp_path / "c"
    with pytest.raises(ClusterError, match=r"slurmctld.*\n(.*\n)*.*Address already in use"):
        up(ClusterSpec("other", directory, tmp_path / "runs", nodes=1))
    assert not directory.exists()
    wait_until(lambda: not processes_naming(directory))  # slurmctld's child ends after it
    assert cluster.status().up


@pytest.mark.campaign
def test_two_clusters_are_independent(cluster: Cluster, tmp_path: Path) -> None:
    """`down` ends running jobs, including processes that have left their step, and leaves the other cluster alone."""
    directory = tmp_path / "c"
    spec = ClusterSpec("second", directory, tmp_path / "runs", nodes=2, gpus_per_node=0, cpus_per_node=2)
    spec = replace(spec, merge_pages=merges_pages())
    second, _ = up(spec)
    assert second.place != cluster.place
    assert set(second.client.partitions()) == {"gpu", "urgent", "cpu"}
    escape = "setsid sleep 1000 & trap '' TERM; sleep 2000"
    environment = {"SLURM_CONF": str(spec.slurm_conf), "PATH": "/usr/bin:/bin"}
    argv = ["sbatch", "--nodes=2", "--output=/dev/null", f"--wrap=srun bash -c '{escape.replace(chr(39), chr(34))}'"]
    subprocess.run(argv, env=environment, check=True)
    wait_until(lambda: sum(r"b'sleep\x001000" in line for line in processes_naming(spec.slurm_conf)) == 2)
    jobs = [Path("/proc", str(process.pid)) for process in job_processes(spec.slurm_conf)]
    personalities = {int((job / "personality").read_text(), 16) for job in jobs}
    Cluster.load(directory).down()
    assert personalities == {NO_RANDOM_ADDRESSES if spec.merge_pages else 0}
    assert not directory.exists()
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not processes_naming(directory))
    assert cluster.status().up
    assert not SlurmClient(str(spec.slurm_conf)).ping()

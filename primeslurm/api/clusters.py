"""Embedded clusters: a real Slurm with fake GPUs on this machine, for trying things out."""

from __future__ import annotations

from pathlib import Path

from primeslurm.testbed.embedded_slurm.cluster import Cluster, ClusterStatus, default_directory, known_directories, up
from primeslurm.testbed.embedded_slurm.config import ClusterSpec

__all__ = ["Cluster", "ClusterSpec", "ClusterStatus", "find_cluster", "find_clusters", "start_cluster"]


def start_cluster(
    name: str = "local",
    *,
    nodes: int = 4,
    gpus_per_node: int = 8,
    cpus_per_node: int = 16,
    control_nodes: int = 1,
    runs: Path = Path("runs"),
    directory: Path | None = None,
) -> tuple[Cluster, bool]:
    """Start a cluster, and wait until all of its nodes are idle. It runs until its `down`.

    Args:
        name: of the cluster.
        nodes: with GPUs, in partition gpu.
        gpus_per_node: fake GPUs of each of these nodes.
        cpus_per_node: CPU cores that each node claims to have.
        control_nodes: nodes without GPUs, in partition cpu.
        runs: directory of runs, for the cluster's site file. It outlives the cluster.
        directory: of everything that the cluster writes. Default: ~/.primeslurm/clusters/NAME.

    Returns:
        The cluster, whose `spec.site_file` is the site of recipes on it; and whether it was started: False if it was
        up already.

    Raises:
        UsageError: a setting is wrong, programs are missing, or the directory is in use otherwise.
        ClusterError: a daemon did not come up. Nothing is left behind then.
    """
    where = _directory(name, directory)
    return up(ClusterSpec(name, where, runs.absolute(), nodes, gpus_per_node, cpus_per_node, control_nodes))


def find_cluster(name: str = "local", directory: Path | None = None) -> Cluster:
    """Find a cluster that was started, up or not.

    Args:
        name: of the cluster.
        directory: as `start_cluster` was told.

    Raises:
        UsageError: there is none.
    """
    return Cluster.load(_directory(name, directory))


def find_clusters() -> list[Cluster]:
    """Find the clusters that this user started without a directory of their own, up or not."""
    return [Cluster.load(directory) for directory in known_directories()]


def _directory(name: str, directory: Path | None) -> Path:
    return (directory or default_directory(name)).absolute()

"""Embedded Slurm clusters on this machine, for `primeslurm cluster` and `--emulate`.

This is the only module of the product that imports `primeslurm.testbed`.
"""

from __future__ import annotations

from pathlib import Path

from primeslurm.testbed.embedded_slurm import page_merging
from primeslurm.testbed.embedded_slurm.cluster import Cluster, ClusterStatus, default_directory, known_directories, up
from primeslurm.testbed.embedded_slurm.config import ClusterSpec, LoopbackPlace, is_name, site

__all__ = [
    "Cluster",
    "ClusterSpec",
    "ClusterStatus",
    "LoopbackPlace",
    "default_directory",
    "find_cluster",
    "find_clusters",
    "is_name",
    "page_merging",
    "site",
    "start_cluster",
    "up",
]


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
    """Start a cluster and wait until all of its nodes are idle. Return it, and False if it was up already.

    `Cluster.down` stops it, and `spec.site_file` is its site file.

    Args:
        name: name of the cluster, for `find_cluster`.
        nodes: number of nodes in partition `gpu`.
        gpus_per_node: number of fake GPUs per GPU node.
        cpus_per_node: number of CPU cores that each node reports to Slurm.
        control_nodes: number of nodes in partition `cpu`.
        runs: directory of runs in the cluster's site file. It remains when the cluster is stopped.
        directory: directory for all files of the cluster. Default: ~/.primeslurm/clusters/NAME.

    Raises:
        UsageError: a setting is wrong, programs are missing, or the directory is in use.
        ClusterError: a daemon did not start. All others are stopped.
    """
    where = _directory(name, directory)
    return up(ClusterSpec(name, where, runs.absolute(), nodes, gpus_per_node, cpus_per_node, control_nodes))


def find_cluster(name: str = "local", directory: Path | None = None) -> Cluster:
    """Return a cluster that may be up or down. Raises UsageError if it does not exist."""
    return Cluster.load(_directory(name, directory))


def find_clusters() -> list[Cluster]:
    """Return this user's clusters in the default directory, up or down."""
    return [Cluster.load(directory) for directory in known_directories()]


def _directory(name: str, directory: Path | None) -> Path:
    return (directory or default_directory(name)).absolute()

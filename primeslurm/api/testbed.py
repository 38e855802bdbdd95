"""Embedded Slurm clusters on this machine, for `primeslurm cluster` and `--emulate`.

Only this module of the product imports `primeslurm.testbed`. Other modules import its names from here.
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
    """Start a cluster, and wait until all of its nodes are idle. It runs until its `down` method is called.

    Args:
        name: name of the cluster.
        nodes: number of nodes in partition `gpu`.
        gpus_per_node: fake GPUs of each of these nodes.
        cpus_per_node: CPU cores that each node reports to Slurm.
        control_nodes: number of nodes in partition `cpu`.
        runs: directory of runs, for the site file of the cluster. It outlives the cluster.
        directory: directory of everything that the cluster writes. Default: ~/.primeslurm/clusters/NAME.

    Returns:
        The cluster, whose `spec.site_file` is the site of recipes on it, and False if it was already up.

    Raises:
        UsageError: a setting is wrong, programs are missing, or the directory is in use.
        ClusterError: a daemon did not start. Nothing is left behind.
    """
    where = _directory(name, directory)
    return up(ClusterSpec(name, where, runs.absolute(), nodes, gpus_per_node, cpus_per_node, control_nodes))


def find_cluster(name: str = "local", directory: Path | None = None) -> Cluster:
    """Return a cluster, whether it is up or not. Pass the `directory` that was passed to `start_cluster`.

    Raises:
        UsageError: there is no such cluster.
    """
    return Cluster.load(_directory(name, directory))


def find_clusters() -> list[Cluster]:
    """Return the clusters that this user started in their default directory, whether they are up or not."""
    return [Cluster.load(directory) for directory in known_directories()]


def _directory(name: str, directory: Path | None) -> Path:
    return (directory or default_directory(name)).absolute()

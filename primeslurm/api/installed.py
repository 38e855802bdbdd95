"""What is installed on which node of a site, held against the lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from primeslurm.api.sites import find_site
from primeslurm.errors import UsageError, Violation
from primeslurm.recipe import Site
from primeslurm.slurm import inventory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.inventory import InstalledDifference, Parts


@dataclass(frozen=True)
class Installed:
    """What nodes have."""

    nodes: Mapping[str, Parts | None]
    """Version by part, by node; None for a node that is down."""
    differences: Sequence[InstalledDifference]

    @property
    def well(self) -> bool:
        """Whether nothing that is required is missing or another version."""
        return not any(each.required for each in self.differences)


def installed(site_file: Path | None, node: str | None = None, *, every: bool = False) -> Installed:
    """Ask this host, one node, or all nodes of the site.

    Raises:
        UsageError: there is no such node or no site file.
        ClusterError: Slurm does not answer, or nodes are not free within a minute.
    """
    if node is not None and every:
        raise UsageError([Violation("--node", node, "contradicts --all", "keep one of them")])
    site = find_site(site_file) if node or every or site_file else None
    pins = inventory.lock(site.device if site else _device())
    nodes: dict[str, Parts | None] = {}
    gpu_nodes: list[str] = []
    if site is not None and (node or every):
        nodes |= inventory.on_nodes(site, SlurmClient(site.slurm_conf), node)
        gpu_nodes = _gpu_nodes(site)
    else:
        nodes |= inventory.here()
    return Installed(nodes, inventory.differences(nodes, pins, gpu_nodes))


def _device() -> str:
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def _gpu_nodes(site: Site) -> list[str]:
    if site.device != "cuda":
        return []
    partitions = {kind.partition for kind in site.nodes.values() if kind.gpus}
    return [name for partition in partitions for name in SlurmClient(site.slurm_conf).nodes_of(partition)]

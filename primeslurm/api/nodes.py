"""The nodes of a site: which failed lately, and what is installed on them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from primeslurm.api.sites import find_site
from primeslurm.errors import UsageError, Violation
from primeslurm.plan.model import Plan
from primeslurm.recipe import Site
from primeslurm.recipe.reading.explain import suggestion
from primeslurm.run.exclusion import spared
from primeslurm.run.ledger import BadNode, Ledger, avoiding
from primeslurm.slurm import inventory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.inventory import InstalledDifference, Parts


def bad_nodes(runs: Path, now: float) -> list[BadNode]:
    """List the nodes that jobs of this directory of runs keep away from, newest first. `now`: seconds since 1970."""
    return Ledger(runs).entries(now)


def avoid_bad_nodes(plan: Plan, slurm_conf: str | None) -> Plan:
    """Exclude the ledger's nodes from a plan's job, as far as its partitions can spare them.

    Args:
        plan: of a run in the directory whose ledger counts.
        slurm_conf: SLURM_CONF of the cluster, where it is not the system's own.

    Raises:
        ClusterError: Slurm does not answer.
    """
    now = time.time()
    bad = bad_nodes(Path(plan.run_dir).parent, now)
    if not bad:
        return avoiding(plan, [], now)
    partitions = SlurmClient(slurm_conf).nodes_by_partition({group.partition for group in plan.groups})
    known = {node for nodes in partitions.values() for node in nodes}
    avoided = spared(plan, bad, partitions)
    needed = [entry for entry in bad if entry.node in known and entry not in avoided]
    return avoiding(plan, avoided, now, needed=needed)


def forget_bad_nodes(runs: Path, names: Sequence[str], now: float) -> None:
    """Let jobs use these nodes again.

    Args:
        runs: directory of the runs whose ledger names them.
        names: the nodes.
        now: seconds since 1970.

    Raises:
        UsageError: one is not in the ledger; then none is forgotten.
    """
    ledger = Ledger(runs)
    known = [entry.node for entry in ledger.entries(now)]
    unknown = [name for name in names if name not in known]
    if unknown:
        why = "is not in the ledger of bad nodes"
        raise UsageError([Violation("--forget", name, why, suggestion(name, known)) for name in unknown])
    for name in names:
        ledger.forget(name)


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
    """Hold what this host, one node, or all nodes of the site have against the lock.

    Args:
        site_file: as of `find_site`; without it, `node` and `every`, this host is no node of a site.
        node: one node of the site, by name.
        every: all nodes of the site.

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

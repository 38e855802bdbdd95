"""Decide whether host memory can hold copies of the ranks' state, so that training continues during a checkpoint."""

from __future__ import annotations

import logging
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from primeslurm.trainer.distributed.world import World

log = logging.getLogger(__name__)
# Fraction of the free host memory that the copies may use. Batches and the page cache need the rest.
MAX_FRACTION = 0.75
# A larger cgroup limit means "unlimited": cgroup v1 reports the largest page-aligned integer
_NO_LIMIT = 1 << 60


class Report(NamedTuple):
    """Host memory of one rank's node, and the rank's demand."""

    node: str
    needed: int  # bytes of the rank's copies
    free: int  # bytes of host memory available to the rank


def copies_fit(world: World, state: Mapping[str, Any]) -> bool:
    """Return whether every node can hold copies of its ranks' state. A collective."""
    report = Report(socket.gethostname(), tensor_bytes(state), free_bytes())
    short_nodes = nodes_short_of_memory(world.collect(report))
    for node in short_nodes if world.is_main else ():
        log.warning("checkpoints stop training until they are written: no host memory for copies on %s", node)
    return not short_nodes


def nodes_short_of_memory(reports: Iterable[Report]) -> list[str]:
    """List the nodes whose ranks need more than their allowed fraction of the free memory, with the numbers."""
    by_node = defaultdict[str, list[Report]](list)
    for report in reports:
        by_node[report.node].append(report)
    short_nodes = []
    for node, ranks in sorted(by_node.items()):
        needed, free = sum(rank.needed for rank in ranks), min(rank.free for rank in ranks)
        if needed > MAX_FRACTION * free:
            short_nodes.append(f"{node} ({needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free)")
    return short_nodes


def tensor_bytes(state: Any) -> int:
    if isinstance(state, Mapping):
        return sum(tensor_bytes(value) for value in state.values())
    if isinstance(state, DTensor):
        state = state.to_local()
    return state.nbytes if isinstance(state, torch.Tensor) else 0


def free_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that this process can still allocate, limited by the machine and by its cgroups."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_free_in_cgroups(root)])


def _free_in_cgroups(root: Path) -> Iterable[int]:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:  # cgroup v2
            top, limit, usage, cached = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        cgroup = root / top / name.lstrip("/")
        for directory in (cgroup, *cgroup.parents):
            if not directory.is_relative_to(root / top):
                break
            yield from _free_in_cgroup(directory / limit, directory / usage, directory / "memory.stat", cached)


def _free_in_cgroup(limit: Path, usage: Path, statistics: Path, cached: str) -> Iterable[int]:
    try:
        maximum = limit.read_text().strip()
        if maximum == "max" or int(maximum) > _NO_LIMIT:
            return
        counters = dict(line.split() for line in statistics.read_text().splitlines())
        # The kernel evicts inactive page cache under pressure, so it counts as free.
        yield max(0, int(maximum) - int(usage.read_text()) + int(counters.get(cached, 0)))
    except OSError:
        return  # the root cgroup has no limit file, and containers hide some of the listed cgroups

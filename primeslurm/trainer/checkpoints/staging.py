"""Whether host memory has room for copies of what the ranks save, so that training can go on while they are written."""

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
SHARE = 0.75
"""Of the free host memory that copies may take: batches, caches of files and everything else want some, too."""
_NO_LIMIT = 1 << 60
"""A limit beyond this is none: cgroups of the first version have the largest page-aligned number then."""


class Report(NamedTuple):
    """What one rank says of itself and its node."""

    node: str
    needed: int
    """Bytes of its copies."""
    free: int
    """Bytes of host memory that it could have."""


def copies_fit(world: World, state: Mapping[str, Any]) -> bool:
    """Whether every node's free host memory holds copies of what its ranks save. All ranks call it together."""
    mine = Report(socket.gethostname(), tensor_bytes(state), free_bytes())
    lacking = nodes_that_lack(world.collect(mine))
    for node in lacking if world.is_main else ():
        log.warning("checkpoints stop training until they are written: no host memory for copies on %s", node)
    return not lacking


def nodes_that_lack(reports: Iterable[Report]) -> list[str]:
    """Name the nodes, with figures, whose ranks together need more than their share of what is free."""
    by_node = defaultdict[str, list[Report]](list)
    for report in reports:
        by_node[report.node].append(report)
    found = []
    for node, ranks in sorted(by_node.items()):
        needed, free = sum(rank.needed for rank in ranks), min(rank.free for rank in ranks)
        if needed > SHARE * free:
            found.append(f"{node} ({needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free)")
    return found


def tensor_bytes(state: Any) -> int:
    """Add up this rank's parts of all tensors of a state."""
    if isinstance(state, Mapping):
        return sum(tensor_bytes(value) for value in state.values())
    if isinstance(state, DTensor):
        state = state.to_local()
    return state.nbytes if isinstance(state, torch.Tensor) else 0


def free_bytes(root: Path = Path("/")) -> int:
    """Work out how much host memory this process could still have: the machine's, and what its cgroups leave.

    Args:
        root: above `proc` and `sys`.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_left_by_cgroups(root)])


def _left_by_cgroups(root: Path) -> Iterable[int]:
    """What each cgroup of this process leaves, of either version; pages that only cache files count as free."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, limit, usage, cached = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        here = root / top / name.lstrip("/")
        for directory in (here, *here.parents):
            if not directory.is_relative_to(root / top):
                break
            yield from _left(directory / limit, directory / usage, directory / "memory.stat", cached)


def _left(limit: Path, usage: Path, statistics: Path, cached: str) -> Iterable[int]:
    try:
        most = limit.read_text().strip()
        if most == "max" or int(most) > _NO_LIMIT:
            return
        counted = dict(line.split() for line in statistics.read_text().splitlines())
        yield max(0, int(most) - int(usage.read_text()) + int(counted.get(cached, 0)))
    except OSError:
        return  # the top has none, and in containers not all that are named are there

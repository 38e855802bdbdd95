"""How many collectives this rank has begun: by it the head tells who is behind when all ranks wait for one another."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist

from primeslurm.records.heartbeats import LivenessReporter

PERIOD_S = 1.0
UNEQUAL = "unequal"
"""Description of groups in which ranks send to one another, each as much as it has: they are not counted."""


def begun() -> int:
    """Return the number of collectives that this rank has begun, in all of its process groups.

    Ranks that are in step have begun equally many: every group counts its own, whoever it consists of.
    """
    return sum(_count(group) for group in list(dist.distributed_c10d._world.pg_map))


def _count(group: Any) -> int:
    if group.group_desc == UNEQUAL:
        return 0
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0  # a mesh has groups of its own for what is not split: they carry nothing, and count nothing


def tell(liveness: LivenessReporter) -> None:
    """Keep the count in the pulse's page, from a thread: whoever waits in a collective can tell nothing itself."""
    threading.Thread(target=_tell, args=(liveness,), name="collectives", daemon=True).start()


def _tell(liveness: LivenessReporter) -> None:
    while dist.is_initialized():
        liveness.count_collectives(begun())
        time.sleep(PERIOD_S)

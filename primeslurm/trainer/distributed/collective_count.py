"""Count the collectives that this rank has started. The head compares the counts to find the rank that is behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist

from primeslurm.records.heartbeats import LivenessReporter

PERIOD_S = 1.0
# Description of process groups whose ranks exchange different numbers of messages. Their messages are not counted.
UNEQUAL = "unequal"


def started() -> int:
    """Return the number of collectives that this rank has started in all process groups.

    The count is equal on all ranks that are in step, because every group numbers its own collectives.
    """
    return sum(_count(group) for group in list(dist.distributed_c10d._world.pg_map))


def _count(group: Any) -> int:
    if group.group_desc == UNEQUAL:
        return 0
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0  # a mesh dimension of size 1 has a group without a communicator


def report(liveness: LivenessReporter) -> None:
    """Report the count with the heartbeats, from a thread, because a rank in a collective cannot report anything."""
    threading.Thread(target=_report, args=(liveness,), name="collectives", daemon=True).start()


def _report(liveness: LivenessReporter) -> None:
    while dist.is_initialized():
        liveness.count_collectives(started())
        time.sleep(PERIOD_S)

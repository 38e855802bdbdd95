"""From a restarted orchestrator to the trainer ranks: the batch is only on disk, and fetched again.

The ranks are those of `data_path_fetch`. The group files are sparse, so this measures memory, not the disk's speed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.support.data_path_fetch import fetched, recipe_of
from benchmarks.support.data_path_restart import from_disk
from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.rollouts.spool import Spool


def measure(rollouts: int) -> dict[str, Any]:
    """Fetch a batch of this many rollouts, a multiple of 16."""
    return from_disk(_again, rollouts)


def _again(directory: str, rollouts: int) -> dict[str, Any]:
    recipe, spool = recipe_of(rollouts), Spool(Path(directory, "rollouts"))
    batches = Batches(recipe, algorithms.from_recipe(recipe), spool.on_disk)
    batches.add(1, spool.load())
    found = asyncio.run(fetched(batches))
    found["peak_memory_per_batch_byte"] = found.pop("peak_memory_beside_rollouts_per_batch_byte")
    return found

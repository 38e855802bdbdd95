"""A restarted orchestrator reads a batch from disk to report its step: memory, and event-loop lag.

The trainer has the batch, and reports it as trained. The metrics come from groups that are only on disk. Their files
are sparse, so this measures memory, not the disk's speed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support.data_path_fetch import GROUP, TOKENS, _groups, _watch, recipe_of
from benchmarks.support.data_path_receive import in_process
from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.rollouts.groups import begin, digest_of
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.orchestrator.telemetry.batch_metrics import batch_metrics
from primeslurm.plan.commands.processes import HUGE_PAGES


def measure(rollouts: int) -> dict[str, Any]:
    """Report a step of this many rollouts, a multiple of 16."""
    return from_disk(_report, rollouts)


def from_disk(measured: Callable[[str, int], dict[str, Any]], rollouts: int) -> dict[str, Any]:
    """Measure a separate process that reads a batch of this many rollouts from disk."""
    os.environ |= HUGE_PAGES  # as the orchestrator is started
    with tempfile.TemporaryDirectory(prefix="data_path-") as directory:
        in_process(_write_groups, directory, rollouts)
        return in_process(measured, directory, rollouts)


def _write_groups(directory: str, rollouts: int) -> dict[str, Any]:
    """Write the groups of a batch of this many rollouts, with holes for the routed experts."""
    spool = Path(directory, "rollouts")
    spool.mkdir()
    for group in _groups(rollouts):
        for (rollout,) in group.rollouts:
            assert rollout.routed_experts is not None
            rollout.routed_experts.fill(0)
        parts = group.to_parts()[len(begin(group.head(0, ""))) :]
        head = group.head(sum(memoryview(part).nbytes for part in parts), digest_of(parts))
        with (spool / f"{group.id}.group").open("wb") as file:
            for part in [*begin(head), *parts]:
                if memoryview(part).nbytes > TOKENS * GROUP:  # routed experts, which are only zeros
                    file.seek(memoryview(part).nbytes, 1)
                else:
                    file.write(part)
            file.truncate()
    return {}


def _report(directory: str, rollouts: int) -> dict[str, Any]:
    return asyncio.run(_reported(Spool(Path(directory, "rollouts")), rollouts))


async def _reported(spool: Spool, rollouts: int) -> dict[str, Any]:
    recipe = recipe_of(rollouts)
    batches = Batches(recipe, algorithms.from_recipe(recipe), spool.on_disk)
    batches.add(1, spool.load())
    late, own, used = list[float](), list[float](), list[int]()
    watching = asyncio.create_task(_watch(late, own, used))
    await asyncio.sleep(0.1)
    before, began = used[-1], time.monotonic()
    groups = await batches.read(1)
    row = await asyncio.to_thread(batch_metrics, groups, 1, recipe.seq_len)
    seconds = time.monotonic() - began
    watching.cancel()
    batches.close()
    assert row["rollouts/length_mean"] == TOKENS
    whole = sum(path.stat().st_size for path in spool._directory.glob("*.group"))
    return {
        "batch_gb": round(whole / 1e9, 2),
        "seconds": round(seconds, 1),
        "peak_memory_gb": round((max(used) - before) / 1e9, 2),
        "peak_memory_per_batch_byte": round((max(used) - before) / whole, 3),
        "memory_afterwards_gb": round((used[-1] - before) / 1e9, 2),
        "loop_lag_but_for_waits_for_a_cpu_max_ms": round(1e3 * max(own), 1),
    }

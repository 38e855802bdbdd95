"""Trainer ranks of a benchmark: processes on this machine, started by torch's launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primeslurm.plan.commands.command import GIN_OFF
from primeslurm.plan.gpus import ALLOC_CONF, EXPANDABLE, alloc_conf

if TYPE_CHECKING:
    from primeslurm.trainer.distributed.world import World


def run(
    benchmark: str,
    words: Sequence[str],
    count: int,
    out: Path | None,
    measure: Callable[[World], Mapping[str, Any]],
    host_tensors: bool = False,
) -> None:
    """Run a benchmark with several ranks, and write rank 0's result. Each rank calls this function again.

    Args:
        out: file of the result; None to print it only.
        measure: runs on each rank, as a member of this world.
        host_tensors: whether ranks with GPUs also reduce tensors in host memory.
    """
    if "RANK" not in os.environ:
        sys.exit(_start(benchmark, words, count))
    from primeslurm.trainer.base.interrupt import Interrupt
    from primeslurm.trainer.distributed.world import join

    world = join(Interrupt(), 600, host_tensors)
    result = {
        "command": " ".join([f"python -m benchmarks {benchmark}", *words]).partition(" --out ")[0],
        "versions": {name: version(name) for name in ("torch", "torchtitan")},
        **measure(world),
    }
    if world.is_main:
        print(json.dumps(result, indent=2))
        if out:
            out.write_text(json.dumps(result, indent=2) + "\n")
    world.close()


def _start(benchmark: str, words: Sequence[str], count: int) -> int:
    """Start the ranks, and return the launcher's exit code.

    Rank 0 opens the run's gate at the rendezvous port, so the launcher must not use that port for its own store.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    as_planned = {} if alloc_conf(os.environ) else {ALLOC_CONF[0]: EXPANDABLE}
    one_host = {GIN_OFF: "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = os.environ | as_planned | one_host
    return subprocess.call([sys.executable, *launch, "-m", "benchmarks", benchmark, *words], env=environment)

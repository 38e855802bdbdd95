"""A benchmark's own ranks: processes on this machine that are told which rank they are, as torch's launcher does it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def start(benchmark: str, words: Sequence[str], count: int) -> int:
    """Run a benchmark once more as so many ranks, and return the launcher's exit code.

    Rank 0 opens the run's gate at the port where they meet, so the launcher must leave it free (it would share its own
    store there).
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.call([sys.executable, *launch, "-m", "benchmarks", benchmark, *words], env=environment)

"""One of two ranks with collectives in several groups. Rank 1 sleeps instead of joining the last one.

Arguments: paths of the heartbeat pages in /proc, by rank.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from primeslurm.records import heartbeats
from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import join


def main() -> None:
    page = os.open(sys.argv[1 + int(os.environ["RANK"])], os.O_RDWR)
    os.environ[heartbeats.VARIABLE] = str(page)  # as an agent passes it on
    world = join(Interrupt(), timeout_s=600)
    liveness().enter("forward_backward", 3)
    for _ in range(5):
        world.sum(torch.ones(1))
        world.barrier()
    dist.barrier(group=dist.new_group(backend="gloo"))
    liveness().enter("optimizer", 3)
    if os.environ["RANK"] == "1":
        time.sleep(600)
    world.sum(torch.ones(1))


if __name__ == "__main__":
    main()

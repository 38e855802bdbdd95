"""Emulated trainer rank: `python -m primeslurm.testbed.emulated.trainer` with the real trainer's command line."""

from __future__ import annotations

import os
import signal
import sys

from primeslurm.testbed.emulated.rank_group import Ranks, follow


def main(argv: list[str] | None = None) -> int:
    """One rank. Exit codes are the real trainer's: 0 trained to the end, 75 interrupted and checkpointed, 1 failed."""
    port, world = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    if os.environ["RANK"] != "0":
        return follow(os.environ["MASTER_ADDR"], port)
    ranks = Ranks(os.environ["MASTER_ADDR"], port, world - 1)
    signal.signal(signal.SIGUSR1, ranks.interrupt)
    from primeslurm.testbed.emulated.training_loop import train

    return train(argv, ranks)


if __name__ == "__main__":
    sys.exit(main())

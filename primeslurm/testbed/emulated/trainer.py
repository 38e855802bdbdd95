"""Emulated trainer rank: `python -m primeslurm.testbed.emulated.trainer` with the real trainer's command line.

The exit codes are those of the real trainer: 0 finished, 75 interrupted with a checkpoint, 1 failed.
"""

from __future__ import annotations

import os
import signal
import sys

from primeslurm.testbed.emulated.rank_group import Ranks, follow


def main(argv: list[str] | None = None) -> int:
    port, world = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    if os.environ["RANK"] != "0":
        return follow(os.environ["MASTER_ADDR"], port)
    ranks = Ranks(os.environ["MASTER_ADDR"], port, world - 1)
    signal.signal(signal.SIGUSR1, ranks.interrupt)
    from primeslurm.testbed.emulated.training_loop import train

    return train(argv, ranks)


if __name__ == "__main__":
    sys.exit(main())

"""Write, commit, prune and read checkpoints until the test kills this process. Arguments: run directory, first step."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from primeslurm.trainer.checkpoints import shards
from primeslurm.wire.stored import checkpoints


def main() -> None:
    warnings.simplefilter("ignore")
    shards.FILE_BYTES = 1 << 20
    run, step = Path(sys.argv[1]), int(sys.argv[2])
    while True:
        directory = checkpoints.step_dir(run, step) / "trainer"
        directory.mkdir(parents=True, exist_ok=True)
        writer = shards.ShardWriter(directory, shards.ByteCounter(), 4)
        dcp.save({f"t{n}": torch.full((1 << 18,), float(step)) for n in range(8)}, storage_writer=writer, no_dist=True)
        checkpoints.commit(directory.parent, step, 1, writer.files)
        print(step, flush=True)
        checkpoints.prune(run, 2)
        tensors = {f"t{n}": torch.zeros(1 << 18) for n in range(8)}
        dcp.load(tensors, storage_reader=shards.ShardReader(directory, shards.ByteCounter(), 4), no_dist=True)
        step += 1


if __name__ == "__main__":
    main()

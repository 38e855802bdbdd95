"""Restarted ranks with local copies of their checkpoint. The program forks the ranks.

    python -m tests.trainer.checkpoints.restarted_ranks DIRECTORY

Each of three ranks is a node. In each round all ranks resume, save two steps, and are killed. Between rounds, nodes are
replaced and copies truncated. Prints the fraction of bytes that each rank read from copies.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from primeslurm.recipe.sections.trainer import Checkpoint
from primeslurm.trainer.checkpoints import checkpoint, shards
from primeslurm.wire.names import LOCAL_CHECKPOINTS
from tests.trainer.checkpoints.killed_ranks import RANKS, join


def rank_main(rank: int, root: Path, number: int, told: int) -> None:
    """Resume, save two steps, report, and wait to be killed."""
    readers: list[shards.ShardReader] = []
    moved = shards.ByteCounter()

    class Kept(shards.ShardReader):
        def __init__(self, directory: Path, _: shards.ByteCounter, threads: int, copies: dict[str, Path]) -> None:
            super().__init__(directory, moved, threads, copies)
            readers.append(self)

    checkpoint.ShardReader = Kept  # type: ignore[misc]
    os.environ[LOCAL_CHECKPOINTS] = str(root / "nodes" / str(rank))
    config = Checkpoint(interval=1, asynchronous=bool(number % 2), local=str(root))
    model, train_step, saver, timer = join(rank, root / f"store-{number}", root / "run", config)
    resumed = saver.restore(train_step)
    assert resumed == 2 * number and model.values() == {float(resumed)}, f"resumed at {resumed}: {model.values()}"
    for step in (resumed + 1, resumed + 2):
        with torch.no_grad():
            model.matrix.fill_(step)
        saver.after(step, train_step, timer)
    saver._commit_pending(timer)
    assert saver._copies is not None
    saver._copies.wait()
    near = sum(reader.bytes_from_copies for reader in readers)
    os.write(told, f"{rank} {near / moved.bytes if moved.bytes else 0.0}\n".encode())
    signal.pause()


def run_round(root: Path, number: int) -> list[float]:
    """Run the ranks until all have saved, and kill them. Return the fraction that each read from copies."""
    reading, told = os.pipe()
    children = []
    for rank in range(RANKS):
        (root / "nodes" / str(rank)).mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        if not (child := os.fork()):
            try:
                os.close(reading)
                rank_main(rank, root, number, told)
            finally:
                os._exit(1)
        children.append(child)
    os.close(told)
    with os.fdopen(reading) as pipe:
        lines = [line for _ in range(RANKS) if (line := pipe.readline())]
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len(lines) == RANKS, f"a rank failed in round {number}"
    return [float(line.split()[1]) for line in sorted(lines)]


def copy_of(root: Path, rank: int, step: int, keeper: int) -> Path:
    return root / "nodes" / str(keeper) / f"rank-{keeper}" / f"step_{step:06d}" / f"__{rank}_0.distcp"


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    (root / "run").mkdir()
    actual = {"first": run_round(root, 0), "same nodes": run_round(root, 1)}
    shutil.rmtree(root / "nodes" / "1")
    actual["node 1 is another"] = run_round(root, 2)
    assert copy_of(root, 1, 6, keeper=2).read_bytes() == copy_of(root, 1, 6, keeper=1).read_bytes()
    own = copy_of(root, 0, 6, keeper=0)
    data = bytearray(own.read_bytes())
    data[len(data) // 2] ^= 1
    own.write_bytes(data)
    os.truncate(copy_of(root, 2, 6, keeper=2), 1000)
    actual["copies are torn"] = run_round(root, 3)
    shutil.rmtree(root / "nodes" / "1")
    shutil.rmtree(root / "nodes" / "2")
    actual["nodes 1 and 2 are others"] = run_round(root, 4)
    print("FRACTIONS", json.dumps(actual))


if __name__ == "__main__":
    main()

"""Ranks that save, prune and resume, and are killed at random points. The program forks the ranks.

    python -m tests.trainer.checkpoints.killed_ranks DIRECTORY SEED ROUNDS

In each round three ranks resume and continue. One of them kills itself at a random byte or file, and the others are
killed then. Committed checkpoints must be undamaged, have the values of their step, and include all reported commits.
The next round must resume from the newest one. In every other pair of rounds ranks have local copies, which are lost or
truncated between rounds.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from primeslurm.recipe.sections.trainer import Checkpoint
from primeslurm.records.journal import Journal
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.checkpoints import checkpoint, local_copies, shards
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.names import LOCAL_CHECKPOINTS
from primeslurm.wire.stored import checkpoints

RANKS, KEEP, STEPS = 3, 2, 5
ROWS, WIDTH = 3 * 1024, 64


class Weights(torch.nn.Module):
    """A sharded matrix whose elements all equal the step."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (RANKS,))
        self.matrix = torch.nn.Parameter(distribute_tensor(torch.zeros(ROWS, WIDTH), mesh, [Shard(0)]))

    def values(self) -> set[float]:
        return set(self.matrix.detach().to_local().unique().tolist())  # type: ignore[attr-defined]


WORK = {
    "prune": "pruning",
    "commit": "committing",
    "_load": "reading",
    "_read_checked": "reading",
    "_move": "copying from node to node",
    "_newest_undamaged": "looking for the newest",
    "_write": "writing",
    "_begin": "beginning",
}
"""Activity by function name. The innermost function on the stack counts."""


def die(told: int) -> None:
    """Report what this thread does, and kill this process."""
    frame, names = sys._getframe(), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    doing = next((WORK[name] for name in names if name in WORK), "between")
    os.write(told, f"{doing}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_byte(fatal: int, told: int) -> None:
    """Kill this process when it has written and read `fatal` bytes."""
    seen = [0]

    class Counted(shards.ByteCounter):
        def __setattr__(self, name: str, value: int) -> None:
            seen[0] += value - getattr(self, "bytes", 0)
            if seen[0] >= fatal:
                die(told)
            super().__setattr__(name, value)

    checkpoint.ByteCounter = local_copies.ByteCounter = Counted  # type: ignore[misc]


def die_at_file(fatal: int, root: Path, told: int) -> None:
    """Kill this process before it opens, renames or deletes the `fatal`-th checkpoint file."""
    left = [fatal]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.remove", "os.rmdir", "os.rename", "os.mkdir"):
            return
        # Deleting a tree names its entries relative to an open directory.
        relative = event in ("os.remove", "os.rmdir") and arguments[1] >= 0
        if str(root) in str(Path(f"/proc/self/fd/{arguments[1]}").readlink() if relative else arguments[0]):
            left[0] -= 1
            if left[0] <= 0:
                die(told)

    sys.addaudithook(hook)


def join(rank: int, store: Path, run: Path, config: Checkpoint) -> tuple[Weights, Any, Checkpoints, PhaseTimer]:
    """Return a rank's model, training state, checkpoints and timer."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=600))
    interrupt: Any = None
    world = World(rank, RANKS, torch.device("cpu"), control, interrupt, "")
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    policy = SimpleNamespace(model=model)
    train_step: Any = SimpleNamespace(policy=policy, optimizer=optimizer, scheduler=scheduler, draft_training=None)
    saver = Checkpoints(run, os.getppid(), config, world, None)
    return model, train_step, saver, PhaseTimer(Journal(store.parent, f"rank-{rank}"), record=False)


def rank_main(rank: int, store: Path, run: Path, newest: int, told: int, config: Checkpoint) -> None:
    """Resume, and save a checkpoint after each of some steps. Rank 0 reports the commits."""
    model, train_step, saver, timer = join(rank, store, run, config)
    step = saver.restore(train_step)
    assert step == newest and model.values() == {float(step)}, f"resumed at {step}, committed {newest}"
    for _ in range(STEPS):
        step += 1
        with torch.no_grad():
            model.matrix.fill_(step)
        saver.after(step, train_step, timer)
        if rank == 0:
            os.write(told, f"{step - 1 if config.asynchronous else step}\n".encode())
    saver.finish(step, train_step, timer)
    os.write(told, f"{step}\n".encode())


def lose_copies(nodes: Path, choose: random.Random) -> None:
    """Delete a node's copies, or truncate a copy, or do nothing."""
    what = choose.choice(("node", "file", "nothing"))
    copies = sorted(nodes.glob("*/rank-*/step_*/*"))
    if what == "node":
        shutil.rmtree(nodes / str(choose.randrange(RANKS)), ignore_errors=True)
    elif what == "file" and copies:
        os.truncate(torn := choose.choice(copies), choose.randrange(torn.stat().st_size + 1))
        os.truncate(torn, choose.choice((torn.stat().st_size, 1 << 18)))


def attempt(number: int, run: Path, newest: int, choose: random.Random) -> tuple[int, str]:
    """Run one attempt with its kill. Return the newest reported commit, and what the victim did."""
    directory = run.parent / f"attempt-{number}"
    directory.mkdir()
    reading, told = os.pipe()
    victim, at_byte, asynchronous = choose.randrange(RANKS), choose.random() < 0.5, number % 2 == 1
    nodes = run.parent / "nodes"
    config = Checkpoint(interval=1, keep=KEEP, asynchronous=asynchronous, local=str(nodes) if number % 4 > 1 else None)
    lose_copies(nodes, choose)
    for rank in range(RANKS):
        (nodes / str(rank)).mkdir(parents=True, exist_ok=True)
    share = ROWS * WIDTH * 4 // RANKS
    byte, file = choose.randrange(STEPS * share), choose.randrange(1, 100 if victim == 0 else 16)
    children = []
    for rank in range(RANKS):
        if not (child := os.fork()):
            code = 1
            try:
                os.close(reading)
                os.environ[LOCAL_CHECKPOINTS] = str(nodes / str(rank))
                if rank == victim:
                    die_at_byte(byte, told) if at_byte else die_at_file(file, run, told)
                rank_main(rank, directory / "store", run, newest, told, config)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    os.close(told)
    _, status = os.waitpid(children[victim], 0)
    killed = os.WIFSIGNALED(status)
    for child in children:
        if child != children[victim]:
            if killed:
                os.kill(child, signal.SIGKILL)
            _, other = os.waitpid(child, 0)
            assert killed or other == 0, f"a rank failed: {other}"
    assert killed or status == 0, f"the victim failed: {status}"
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    said = max((int(line) for line in lines if line.isdigit()), default=0)
    doing = next((line for line in lines if not line.isdigit()), "nothing: the attempt ended")
    point = f"byte {byte}" if at_byte else f"file {file}"
    print(f"{'killed' if killed else 'ended'} rank {victim} at {point} {doing}, told {said}", flush=True)
    return said, doing


def check(run: Path, told: int, before: int) -> int:
    """Check the committed checkpoints. Return the newest step."""
    committed = checkpoints.committed(run)
    newest = committed[-1] if committed else 0
    assert newest >= max(told, before), f"a commit is lost: {committed}, told {told}, before {before}"
    assert len(committed) >= min(KEEP, before), f"pruned too much: {committed}"
    for step in committed:
        directory = checkpoints.step_dir(run, step)
        assert checkpoints.damage(directory) == []
        actual = {"model": {"matrix": torch.full((ROWS, WIDTH), -1.0)}}
        reader = shards.ShardReader(directory / "trainer", shards.ByteCounter(), 1)
        dcp.load(actual, storage_reader=reader, no_dist=True)
        assert actual["model"]["matrix"].unique().tolist() == [float(step)], f"step {step} has other values"
    return newest


def main() -> None:
    root, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    shards.CHUNK_BYTES = 1 << 12
    shards.FILE_BYTES = 1 << 17
    choose, newest, began, kills = random.Random(seed), 0, time.monotonic(), Counter[str]()
    (run := root / "run").mkdir()
    for number in range(rounds):
        told, doing = attempt(number, run, newest, choose)
        kills[doing] += 1
        newest = check(run, told, newest)
    print(f"{rounds} rounds, newest commit {newest}, {time.monotonic() - began:.1f} s, killed while {dict(kills)}")


if __name__ == "__main__":
    main()

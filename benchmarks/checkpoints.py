"""What a checkpoint costs to commit and to resume: CPU seconds per GB of rank 0 and of the others, before and after.

Before: torch writes, rank 0 reads all of it back and hashes it (as release 0.1.0 did), for the commit and again to
resume. After: each rank makes digests while it writes, and checks them while it reads.

Sizes are real, disk space is not: tensors are zero, and what was written of them is made a hole at once, by the process
that started the ranks. Copies into the page cache, digests, and reads are paid for; the disk's own time is not in it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

RESULT = Path(__file__).resolve().parent / "results" / "checkpoints.json"
TENSOR_BYTES = 64 << 20
"""Of each tensor: about what a rank holds of a layer's experts."""
BLOCK = 1 << 20
_ZEROS = bytes(BLOCK)
_PUNCH_AND_KEEP_SIZE = 3
Way = Literal["before", "after"]


def _save(way: Way, state: dict[str, Any], directory: Path, rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    from primeslurm.trainer.checkpoints.shards import Moved, ShardWriter
    from primeslurm.wire import checkpoints

    if way == "before":
        dcp.save(state, checkpoint_id=directory / "trainer")
        described = []
    else:
        writer = ShardWriter(directory / "trainer", Moved(), 1)
        dcp.save(state, storage_writer=writer)
        described = writer.files
    if rank == 0:
        checkpoints.commit(directory, 1, 1, described)


def _load(way: Way, state: dict[str, Any], directory: Path, rank: int) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from primeslurm.trainer.checkpoints.shards import Moved, ShardReader
    from primeslurm.wire import checkpoints

    if way == "before":
        if rank == 0 and checkpoints.damage(directory):
            raise AssertionError("damaged")
        dist.barrier()
        dcp.load(state, checkpoint_id=directory / "trainer")
    else:
        dcp.load(state, storage_reader=ShardReader(directory / "trainer", Moved(), 1))


def _seconds(action: Callable[[], None]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    action()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _rank(rank: int, ranks: int, tensors: int, way: Way, root: Path, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(root / f"store-{way}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    # One memory under many names: a rank of the real thing has tens of GB.
    tensor = torch.zeros(TENSOR_BYTES // 4)
    state = {f"rank{rank}.tensor{number}": tensor for number in range(tensors)}
    directory = root / way
    (directory / "trainer").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    saved = _seconds(lambda: _save(way, state, directory, rank))
    dist.barrier()
    loaded = _seconds(lambda: _load(way, state, directory, rank))
    results.put((rank, saved, loaded))
    dist.destroy_process_group()


def _dig(libc: Any, path: Path, start: int) -> int:
    """Make holes of the zeros that were written to a file since `start`. Returns where the next ones start."""
    with path.open("r+b", buffering=0) as file:
        while len(block := os.pread(file.fileno(), BLOCK, start)) == BLOCK:
            if block == _ZEROS:
                offset, length = ctypes.c_long(start), ctypes.c_long(BLOCK)
                if libc.fallocate(file.fileno(), _PUNCH_AND_KEEP_SIZE, offset, length):
                    raise OSError(ctypes.get_errno(), "this file system makes no holes", str(path))
            start += BLOCK
    return start


def measure(way: Way, ranks: int, tensors: int, root: Path) -> dict[str, float]:
    """Save and load one checkpoint.

    Args:
        way: which.
        ranks: processes.
        tensors: of each.
        root: where files go.

    Returns:
        CPU seconds per GB of the checkpoint: of rank 0, and the mean of the others.
    """
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, tensors, way, root, results)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    libc, done = ctypes.CDLL(None, use_errno=True), defaultdict[Path, int](int)
    while any(process.is_alive() for process in processes):
        for path in (root / way / "trainer").glob("*.distcp"):
            done[path] = _dig(libc, path, done[path])
        time.sleep(0.02)
    if any(process.exitcode for process in processes):
        raise SystemExit(f"error: a rank failed, {way}")
    found = sorted(results.get() for _ in processes)
    size = ranks * tensors * TENSOR_BYTES / 1e9
    summary = {}
    for number, what in enumerate(("commit", "resume"), 1):
        summary[f"{what}, rank 0"] = round(found[0][number] / size, 3)
        summary[f"{what}, each other"] = round(statistics.mean(each[number] for each in found[1:]) / size, 3)
    return summary


def main(words: list[str]) -> None:
    """Print and write the CPU seconds of both ways."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks checkpoints", description=__doc__)
    parser.add_argument("directory", type=Path, help="on a file system that makes holes")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=200)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(words)
    import torch.distributed.checkpoint  # noqa: F401  processes that are forked then share it

    tensors = max(1, round(options.gigabytes * 1e9 / options.ranks / TENSOR_BYTES))
    size = round(tensors * options.ranks * TENSOR_BYTES / 1e9, 1)
    found: dict[str, dict[str, float]] = {}
    ways: tuple[Way, ...] = ("after", "before")
    for way in ways:
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            found[way] = measure(way, options.ranks, tensors, Path(name))
        print(f"{way}: {found[way]}", flush=True)
    document = {"machine": platform.platform(), "GB": size, "ranks": options.ranks, "CPU seconds per GB": found}
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"wrote {options.out}")

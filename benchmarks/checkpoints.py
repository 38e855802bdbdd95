"""CPU cost of committing a checkpoint and resuming from it, per GB, before and after an optimisation.

Before: torch writes, and rank 0 reads everything back to hash it, for the commit and again for the resume. After:
`Checkpoints` of the trainer; each rank computes digests while it writes, and checks them while it reads. Before is
measured at `--small`, after at that size and at `--gigabytes`.

Every byte is written, flushed, and read from the file system, which compresses: all tensors of a rank share one memory.
The CPU time of the kernel's compression threads is not counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from benchmarks.support.compressed_disk import DESCRIPTION, allocated, compressed_disk

RESULT = Path(__file__).resolve().parent / "results" / "checkpoints.json"
# Size of each tensor on a rank, about that of its experts of one layer.
TENSOR_BYTES = 64 << 20
_WIDTH = 4096
_LONGEST_WAIT = timedelta(hours=6)
Way = Literal["before", "after"]


class Cost(NamedTuple):
    """Cost of a commit or a resume for one rank."""

    cpu_s: float
    read: int
    written: int
    wall_s: float


class _Named:
    """Tensors under names, as in an optimizer's state."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self._tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _learner(ranks: int, each: int) -> tuple[Any, Any]:
    """Return a model and its optimizer with `each` sharded tensors per kind, and the memory that all share."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    memory = torch.zeros(TENSOR_BYTES // 4 // _WIDTH, _WIDTH)

    def tensors(ending: str) -> dict[str, Any]:
        names = (f"layers_{number}{ending}" for number in range(each))
        return {name: DTensor.from_local(memory, mesh, [Shard(0)], run_check=False) for name in names}

    model = torch.nn.Module()
    for name, tensor in tensors("").items():
        model.register_parameter(name, torch.nn.Parameter(tensor))
    optimizer = _Named(tensors(".exp_avg") | tensors(".exp_avg_sq"))
    return SimpleNamespace(policy=SimpleNamespace(model=model), optimizer=optimizer, scheduler=_Named({})), memory


def _after(rank: int, ranks: int, run: Path, train_step: Any) -> Iterator[Callable[[], object]]:
    """Save and resume as the trainer does."""
    import torch
    import torch.distributed as dist

    from primeslurm.recipe.sections.trainer import Checkpoint
    from primeslurm.records.journal import Journal
    from primeslurm.trainer.base.phase_timer import PhaseTimer
    from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
    from primeslurm.trainer.distributed.world import World

    interrupt: Any = None
    control = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    world = World(rank, ranks, torch.device("cpu"), control, interrupt, "")
    config = Checkpoint(interval=1, asynchronous=False)
    timer = PhaseTimer(Journal(run / "journals", f"rank-{rank}"), record=False)
    saver = Checkpoints(run, 1, config, world, None)
    yield lambda: saver.after(1, train_step, timer)
    resumed = Checkpoints(run, 2, config, world, None)
    yield lambda: resumed.restore(train_step) == 1 or _fail()


def _before(rank: int, ranks: int, run: Path, train_step: Any) -> Iterator[Callable[[], object]]:
    """Save and resume by reading everything back on rank 0."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from primeslurm.trainer.checkpoints.checkpoint import _state
    from primeslurm.wire.stored import checkpoints

    directory = checkpoints.step_dir(run, 1)
    directory.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        state = {name: part.state_dict() for name, part in _state(train_step).items()}
        dcp.save(state, checkpoint_id=directory / "trainer")
        if rank == 0:
            checkpoints.commit(directory, 1, 1)
        dist.barrier()

    def load() -> None:
        if rank == 0 and checkpoints.damage(directory):
            _fail()
        dist.barrier()
        dcp.load(_state(train_step), checkpoint_id=directory / "trainer")

    yield save
    yield load


def _fail() -> None:
    raise AssertionError("the checkpoint is not sound")


def _cost(action: Callable[[], object]) -> Cost:
    def now() -> tuple[float, int, int, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        moved = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return used.ru_utime + used.ru_stime, int(moved["rchar"]), int(moved["wchar"]), time.monotonic()

    start = now()
    action()
    return Cost(*(after - before for before, after in zip(start, now(), strict=True)))


def _rank(rank: int, ranks: int, each: int, way: Way, run: Path, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    store = dist.FileStore(str(run / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_LONGEST_WAIT)
    train_step, memory = _learner(ranks, each)
    memory.fill_(rank + 1)
    costs = []
    for action in (_after if way == "after" else _before)(rank, ranks, run, train_step):
        dist.barrier()
        costs.append(_cost(action))
        if len(costs) == 1:
            memory.zero_()
            for path in run.glob(f"checkpoints/*/trainer/__{rank}_*"):
                with path.open("rb") as file:
                    # so that the resume reads from the disk
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not bool((memory == rank + 1).all()):
        _fail()
    results.put((rank, *costs, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    dist.destroy_process_group()


def measure(way: Way, ranks: int, gigabytes: float, run: Path) -> dict[str, Any]:
    """Save and load one checkpoint.

    Args:
        gigabytes: size of the checkpoint, rounded to whole tensors for weights and two moments.

    Returns:
        CPU seconds per GB of rank 0, and the mean of the others; GB that these moved; elapsed seconds.
    """
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    each = max(1, round(gigabytes * 1e9 / ranks / TENSOR_BYTES / 3))
    processes = [context.Process(target=_rank, args=(rank, ranks, each, way, run, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"error: a rank failed, {way}")
    found = sorted(results.get() for _ in processes)
    size = 3 * each * ranks * TENSOR_BYTES / 1e9
    summary: dict[str, Any] = {"GB": round(size, 1)}
    for number, what in enumerate(("commit", "resume"), 1):
        costs: list[Cost] = [rank[number] for rank in found]
        summary[what] = {
            "seconds": round(max(cost.wall_s for cost in costs), 1),
            "CPU seconds per GB": _of_ranks([cost.cpu_s / size for cost in costs], 3),
            "GB read": _of_ranks([cost.read / 1e9 for cost in costs], 2),
            "GB written": _of_ranks([cost.written / 1e9 for cost in costs], 2),
        }
    return summary | {"most resident memory of a rank, GB": round(max(rank[3] for rank in found) * 1024 / 1e9, 2)}


def _of_ranks(values: list[float], digits: int) -> dict[str, float]:
    return {"rank 0": round(values[0], digits), "each other": round(statistics.mean(values[1:]), digits)}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks checkpoints", description=__doc__)
    parser.add_argument("directory", type=Path, help="has room for a twentieth of the size")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=200)
    parser.add_argument("--small", type=float, default=8)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(words)
    # imported before the fork, so that no rank's CPU time includes imports
    import primeslurm.trainer.checkpoints.checkpoint  # noqa: F401

    runs: list[tuple[Way, float]] = [("before", options.small), ("after", options.small), ("after", options.gigabytes)]
    found: dict[str, Any] = {}
    for way, gigabytes in runs:
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            root = Path(name)
            with compressed_disk(root, int(gigabytes * 1.5e9) + (4 << 30)) as run:
                summary = measure(way, options.ranks, gigabytes, run)
                summary["GB that the image took"] = round(allocated(root) / 1e9, 2)
        found[f"{way}, {gigabytes:g} GB"] = summary
        print(f"{way}: {json.dumps(summary)}", flush=True)
    machine = f"{os.cpu_count()} CPU cores, shared with other work, {platform.platform()}"
    document = {"machine": machine, "file system": DESCRIPTION, "ranks": options.ranks, **found}
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"wrote {options.out}")

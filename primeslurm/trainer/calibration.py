"""Measure a node's rates as one rank of a calibration job: `python -m primeslurm.trainer.calibration`.

Ranks join as trainer ranks do, and measure at the same time, because a training step also uses all GPUs at once. Rank 0
writes all rates to `rates.json` in the run directory (`records.calibration`).
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from primeslurm.base import durable, files, logs
from primeslurm.nn import compat
from primeslurm.records.calibration import FILE, CalibrationRecord, MeasuredRate
from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import World, join
from primeslurm.wire import exit_codes
from primeslurm.wire.transport import secret

log = logging.getLogger("primeslurm.calibration")
REPEATS = 7
# Limit of the whole measurement [s]. It takes less than a minute.
LIMIT_S = 600.0


@dataclass(frozen=True)
class Sizes:
    """Amounts of work that keep a device busy for milliseconds."""

    products: tuple[tuple[int, int, int], ...]  # rows, inputs and outputs of matrix products
    copied: int  # bytes of a copy in memory
    sent: int  # bytes that a rank contributes to a collective
    file: int  # bytes that a node writes and reads


SIZES = {
    "cuda": Sizes(((4096, 4096, 4096), (16384, 2048, 4096), (16384, 6144, 12288)), 2**30, 2**28, 2**31),
    "cpu": Sizes(((256, 256, 256), (512, 512, 512), (1024, 1024, 1024)), 2**26, 2**22, 2**25),
}
Samples = dict[str, list[float]]


def measure(world: World, directory: Path, local_ranks: int, sizes: Sizes) -> tuple[Samples, Samples]:
    """Return this rank's rates by field of `MeasuredRates`, and those of products by size. A collective."""
    products = {"x".join(map(str, size)): _product(world, *size) for size in sizes.products}
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    copies = _seconds(world, lambda: target.copy_(source))
    rates = {"memory_gbytes_per_s": [2 * sizes.copied / seconds / 1e9 for seconds in copies]}  # read and written
    nodes, node, local = world.size // local_ranks, world.rank // local_ranks, world.rank % local_ranks
    in_node = [[node * local_ranks + at for at in range(local_ranks)] for node in range(nodes)]
    across = [[node * local_ranks + at for node in range(nodes)] for at in range(local_ranks)]
    if sent := _collectives(world, in_node, sizes.sent):
        rates["node_gbytes_per_s"] = [rate / 1e9 for rate in sent]
    if sent := _collectives(world, across, sizes.sent):
        rates["network_gbps_per_gpu"] = [8 * rate / 1e9 for rate in sent]
    written, read = _files(world, directory, node, nodes, local, sizes.file)
    rates["storage_write_gbytes_per_s"], rates["storage_read_gbytes_per_s"] = written, read
    return rates, products


def _product(world: World, rows: int, inputs: int, outputs: int) -> list[float]:
    """Return the rates of a matrix product [TFLOPS], in the precision that a run on this device uses."""
    element = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    left = torch.ones(rows, inputs, dtype=element, device=world.device)
    right = torch.ones(inputs, outputs, dtype=element, device=world.device)
    result = torch.empty(rows, outputs, dtype=element, device=world.device)
    times = _seconds(world, lambda: torch.mm(left, right, out=result))
    return [2.0 * rows * inputs * outputs / seconds / 1e12 for seconds in times]


def _seconds(world: World, work: Callable[[], object]) -> list[float]:
    """Return the times of some work that all ranks start together [s]. The first, which warms up, is left out."""
    times = []
    for _ in range(REPEATS + 1):
        world.barrier()
        begin = time.perf_counter()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    liveness().heartbeat()
    return times[1:]


def _collectives(world: World, groups: list[list[int]], size: int) -> list[float]:
    """Return the bytes per second that this rank sends to the others of its group, by the slower collective.

    All groups are busy at the same time. The list is empty if groups have one rank.
    """
    ranks = len(groups[0])
    if ranks == 1:
        return []
    handles = [dist.new_group(ranks) for ranks in groups]
    own = next(handle for handle, ranks in zip(handles, groups, strict=True) if world.rank in ranks)
    values = torch.zeros(size // 4 // ranks * ranks, device=world.device)
    received = torch.empty_like(values)
    exchanged = _seconds(world, lambda: dist.all_to_all_single(received, values, group=own))
    reduced = _seconds(world, lambda: dist.all_reduce(values, group=own))
    sent = values.nbytes * (ranks - 1) / ranks
    rates = [sent / seconds for seconds in exchanged], [2 * sent / seconds for seconds in reduced]
    return min(rates, key=statistics.median)


def _files(
    world: World, directory: Path, node: int, nodes: int, local: int, size: int
) -> tuple[list[float], list[float]]:
    """Return the rates at which nodes write files and read those of another node [GB/s]. One rank of a node does it."""
    data = os.urandom(min(size, 2**20)) * (size // min(size, 2**20))
    own, other = (directory / f"calibration-{at}.bin" for at in (node, (node + 1) % nodes))
    written, read = [], []
    for _ in range(3):
        world.barrier()
        if local == 0:
            begin = time.perf_counter()
            durable.write(own, data)
            written.append(size / (time.perf_counter() - begin) / 1e9)
        world.barrier()
        if local == 0:
            _forget_pages(other)
            begin = time.perf_counter()
            files.read_bytes(other)
            read.append(size / (time.perf_counter() - begin) / 1e9)
        liveness().heartbeat()
    world.barrier()
    if local == 0:
        files.unlink(own)
    return written, read


def _forget_pages(path: Path) -> None:
    """Ask the kernel to drop its copy of a file, so that reading it reaches the file system."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def summarize(by_rank: Iterable[Samples]) -> dict[str, MeasuredRate]:
    """Return each rate over all ranks that measured it."""
    values: Samples = {}
    for samples in by_rank:
        for name, rates in samples.items():
            values.setdefault(name, []).extend(rates)
    return {
        name: MeasuredRate(statistics.median(rates), min(rates), max(rates), len(rates))
        for name, rates in values.items()
        if rates
    }


def record_of(
    world: World, partition: str, ranks: list[tuple[Samples, Samples]], local_ranks: int
) -> CalibrationRecord:
    """Return the record of all ranks' samples."""
    products = summarize(products for _, products in ranks)
    rates = summarize(rates for rates, _ in ranks)
    on_gpu = world.device.type == "cuda"
    return CalibrationRecord(
        at=time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        partition=partition,
        device=world.device.type,
        device_name=torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        nodes=world.size // local_ranks,
        ranks_per_node=local_ranks,
        rates={"products_tflops": list(products.values())[-1]} | rates,
        products=products,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.trainer.calibration", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--partition", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    arguments = parser.parse_args()
    interrupt = Interrupt()
    secret.take()
    logs.configure(f"%(asctime)s rank {os.environ['RANK']} %(levelname)s %(message)s")
    if arguments.device == "cuda" and compat.ON_CPU:
        log.error("the site has device: cuda, but torch %s sees no CUDA device", torch.__version__)
        return exit_codes.FAILED
    liveness().enter("load", limit_s=LIMIT_S)
    world = join(interrupt, LIMIT_S)
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    samples = measure(world, arguments.run_dir, local_ranks, SIZES[world.device.type])
    ranks = world.collect(samples)
    if world.is_main:
        record = record_of(world, arguments.partition, ranks, local_ranks)
        durable.write_json(arguments.run_dir / FILE, msgspec.to_builtins(record))
        for name, rate in (record.rates | record.products).items():
            log.info("%s: %.4g (%.4g to %.4g)", name, rate.median, rate.low, rate.high)
    world.barrier()
    world.close()
    return 0


if __name__ == "__main__":
    if "cpu" in sys.argv:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main())

"""Measure a node's rates as one rank of a calibration job: `python -m primeslurm.trainer.calibration`.

Ranks join as trainer ranks do, and measure at the same time, because a training step also uses all GPUs at once. Rank 0
writes all rates to `rates.json` in the run directory (`records.measured_rates`).
"""

from __future__ import annotations

import argparse
import logging
import math
import os
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
from primeslurm.records.heartbeats import liveness
from primeslurm.records.measured_rates import FILE, CalibrationRecord, MeasuredRate
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import World, join
from primeslurm.wire import exit_codes
from primeslurm.wire.transport import secret

log = logging.getLogger("primeslurm.calibration")
REPEATS, FILE_REPEATS = 7, 3
# Limit of the whole measurement [s]. It takes less than a minute.
LIMIT_S = 600.0
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured operations. Each keeps a device busy for milliseconds."""

    products: tuple[tuple[int, int, int], ...]  # rows, inputs and outputs of matrix products, the largest last
    copied: int  # bytes of a copy in memory
    sent: int  # bytes that a rank contributes to a collective
    file: int  # bytes that a node writes and reads


SIZES = {
    "cuda": Sizes(((4096, 4096, 4096), (16384, 2048, 4096), (16384, 6144, 12288)), 2**30, 2**28, 2**31),
    "cpu": Sizes(((256, 256, 256), (512, 512, 512), (1024, 1024, 1024)), 2**26, 2**22, 2**25),
}


def measure(world: World, directory: Path, local_ranks: int, sizes: Sizes) -> tuple[Samples, Samples]:
    """Return this rank's samples by field of `MeasuredRates`, and those of matrix products by size. A collective."""
    products = {"x".join(map(str, size)): _product(world, *size) for size in sizes.products}
    rates = {"products_tflops": list(products.values())[-1]}
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    times = _seconds(world, lambda: target.copy_(source))
    rates["memory_gbytes_per_s"] = [2 * sizes.copied / seconds / 1e9 for seconds in times]  # read and written
    if world.device.type == "cuda":
        rates |= _cuda_rates(world, sizes)
    ranks = [list(range(first, first + local_ranks)) for first in range(0, world.size, local_ranks)]
    rates["node_gbytes_per_s"] = [rate / 1e9 for rate in _collectives(world, ranks, sizes.sent)]
    across = [list(each) for each in zip(*ranks, strict=True)]
    rates["network_gbps_per_gpu"] = [8 * rate / 1e9 for rate in _collectives(world, across, sizes.sent)]
    return rates | _files(world, directory, local_ranks, sizes.file), products


def _product(world: World, rows: int, inputs: int, outputs: int) -> list[float]:
    """Return the rates of a matrix product [TFLOPS], in the precision that a run on this device uses."""
    element = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    shapes = (rows, inputs), (inputs, outputs), (rows, outputs)
    # Random, because a GPU needs less power for constant data, and computes up to 12 % faster.
    left, right, result = (torch.randn(shape, dtype=element, device=world.device) for shape in shapes)
    times = _seconds(world, lambda: torch.mm(left, right, out=result))
    return [2.0 * rows * inputs * outputs / seconds / 1e12 for seconds in times]


def _cuda_rates(world: World, sizes: Sizes) -> Samples:
    """Return the rates of FP8 products and of copies to and from pinned host memory. A rate that fails is left out."""
    size = sizes.products[-1]
    fp8 = _seconds_if_possible(world, "FP8 products", lambda: _fp8_product(world.device, *size))
    copies = _seconds_if_possible(world, "copies to the host", lambda: _host_copies(world.device, sizes.sent))
    return {
        "fp8_tflops": [2.0 * math.prod(size) / seconds / 1e12 for seconds in fp8],
        "host_gbytes_per_s": [sizes.sent / seconds / 1e9 for seconds in copies],
    }


def _fp8_product(device: torch.device, rows: int, inputs: int, outputs: int) -> Callable[[], object]:
    """Return a product in FP8 with one scale for each matrix."""
    left, right = (torch.randn(size, inputs, device=device).to(torch.float8_e4m3fn) for size in (rows, outputs))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _host_copies(device: torch.device, size: int) -> Callable[[], object]:
    """Return copies of `size` bytes to pinned host memory, and of as many from there, at the same time."""
    hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    side = torch.cuda.Stream(device)

    def copy() -> None:
        buffers[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(side):
            hosts[1].copy_(buffers[1], non_blocking=True)

    return copy


def _seconds_if_possible(world: World, name: str, prepare: Callable[[], Callable[[], object]]) -> list[float]:
    """Return the times of prepared work [s]; none if it fails on a rank, for example because a GPU cannot do it."""
    problem = ""
    try:
        work = prepare()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    # All ranks measure, or none, because they wait for each other.
    if problems := [each for each in world.collect(problem) if each]:
        log.warning("%s are not measured: %s", name, problems[0])
        return []
    return _seconds(world, work)


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
    """Return samples of the bytes per second that this rank sends to its group, in the slower of two collectives.

    `groups` are lists of ranks, all busy at once. `size` is in bytes. Empty if groups have one rank.
    """
    ranks = len(groups[0])
    if ranks == 1:
        return []
    handles = [dist.new_group(members) for members in groups]
    group = next(handle for handle, members in zip(handles, groups, strict=True) if world.rank in members)
    values = torch.zeros(size // 4 // ranks * ranks, device=world.device)
    received = torch.empty_like(values)
    sent = values.nbytes * (ranks - 1) / ranks
    exchanges = _seconds(world, lambda: dist.all_to_all_single(received, values, group=group))
    sums = _seconds(world, lambda: dist.all_reduce(values, group=group))
    rates = [sent / seconds for seconds in exchanges], [2 * sent / seconds for seconds in sums]
    return min(rates, key=statistics.median)


def _files(world: World, directory: Path, local_ranks: int, size: int) -> Samples:
    """Return the rates at which nodes write files and read those of another node [GB/s]. One rank of a node does it."""
    node, nodes = world.rank // local_ranks, world.size // local_ranks
    own, other = (directory / f"calibration-{at}.bin" for at in (node, (node + 1) % nodes))
    is_measuring = world.rank % local_ranks == 0
    chunk = os.urandom(min(size, 2**20))
    data = chunk * (size // len(chunk)) if is_measuring else b""

    def write() -> None:
        with files.keeping_reserve():
            durable.write(own, data)

    def read() -> None:
        files.reading(other, lambda file: os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED))
        files.read_bytes(other)

    work = {"storage_write_gbytes_per_s": write, "storage_read_gbytes_per_s": read}
    rates: Samples = {name: [] for name in work}
    try:
        for name, step in list(work.items()) * FILE_REPEATS:
            world.barrier()
            if is_measuring:
                begin = time.perf_counter()
                step()
                rates[name].append(size / (time.perf_counter() - begin) / 1e9)
            liveness().heartbeat()
        world.barrier()
    finally:
        if is_measuring:
            files.unlink(own)
    return rates


def summarize(by_rank: Iterable[Samples]) -> dict[str, MeasuredRate]:
    """Combine the samples of all ranks into one measured rate per field."""
    values: Samples = {}
    for name, rates in (item for samples in by_rank for item in samples.items() if item[1]):
        values.setdefault(name, []).extend(rates)
    return {name: MeasuredRate(statistics.median(rates), min(rates), max(rates)) for name, rates in values.items()}


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
    local_ranks, device = int(os.environ["LOCAL_WORLD_SIZE"]), world.device.type
    by_rank = world.collect(measure(world, arguments.run_dir, local_ranks, SIZES[device]))
    if world.is_main:
        rates, products = (summarize(samples) for samples in zip(*by_rank, strict=True))
        at, nodes = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()), world.size // local_ranks
        record = CalibrationRecord(at, arguments.partition, device, nodes, local_ranks, rates, products)
        durable.write_json(arguments.run_dir / FILE, msgspec.to_builtins(record))
    world.barrier()
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

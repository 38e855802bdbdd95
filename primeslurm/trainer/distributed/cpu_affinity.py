"""CPU affinity of a rank: it runs on the allowed cores that are nearest to its GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

SYS = Path("/sys")
_ADDRESS_BYTES = 32


@dataclass(frozen=True)
class CpuAffinity:
    """The GPU of a rank, the cores that the rank runs on, and its number of threads."""

    gpu: str  # PCI address of its GPU
    cores: frozenset[int]
    threads: int  # threads per operation: this rank's share of the cores that the node's ranks may use

    def __str__(self) -> str:
        return f"GPU {self.gpu}: cores {_ranges(self.cores)} of {_ranges(allowed())}, {self.threads} threads"


@functools.cache
def allowed() -> frozenset[int]:
    """Return the cores that Slurm and the node agent allow this process, as of the first call."""
    return frozenset(os.sched_getaffinity(0))


def io_threads() -> int:
    """Return the number of files that a rank reads or writes in parallel: its share of the CPUs, at most four."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or max(1, torch.cuda.device_count()))
    return max(1, min(4, len(allowed()) // ranks))


def move_near(gpu: str, ranks: int, sys: Path = SYS) -> CpuAffinity:
    """Pin all threads of this process to the allowed cores that are nearest to a GPU (PCI address).

    The affinity stays as it is if the node does not report these cores, or if none of them is allowed. `ranks` is the
    number of ranks on this node.
    """
    cores = _near(gpu, sys) & allowed() or allowed()
    if cores != allowed():
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(task.name), cores)
    return CpuAffinity(gpu, cores, min(len(cores), max(1, len(allowed()) // ranks)))


def pci_address(device: int) -> str:
    """Return the PCI address of a visible CUDA device in sysfs's form (0000:1b:00.0). Raises OSError."""
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    text = ctypes.create_string_buffer(_ADDRESS_BYTES)
    for call, arguments in (
        (driver.cuInit, (0,)),
        (driver.cuDeviceGet, (ctypes.byref(handle), device)),
        (driver.cuDeviceGetPCIBusId, (text, _ADDRESS_BYTES, handle)),
    ):
        if code := call(*arguments):
            raise OSError(f"{call.__name__} of device {device}: CUDA error {code}")
    return text.value.decode().lower()


def _near(gpu: str, sys: Path) -> frozenset[int]:
    try:
        text = (sys / "bus/pci/devices" / gpu / "local_cpulist").read_text().strip()
    except OSError:  # containers may hide the file
        return frozenset()
    ends = [item.partition("-") for item in text.split(",") if item]
    return frozenset(core for first, _, last in ends for core in range(int(first), int(last or first) + 1))


def _ranges(cores: Iterable[int]) -> str:
    """Format core numbers as the kernel does: 0-3,8."""
    groups = groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])
    runs = [[core for _, core in group] for _, group in groups]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

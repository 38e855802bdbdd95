"""The trainer's ranks: process groups, device, and decisions and errors that all ranks share."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchtitan.config import CommConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from primeslurm.nn import compat
from primeslurm.recipe.sections.trainer import CONTEXT_BYTES, ENGINE_CONTEXT_BYTES
from primeslurm.records.heartbeats import LivenessReporter, liveness
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed import cpu_affinity
from primeslurm.wire.transport import rendezvous
from primeslurm.wire.transport.rendezvous_store import serve_store

log = logging.getLogger(__name__)
T = TypeVar("T")
_HOST = torch.device("cpu")


class RankError(Exception):
    """A failure on at least one rank. Every rank raises it, so that none keeps waiting for the others."""


@dataclass(frozen=True)
class World:
    """This trainer rank, and collectives of all ranks over host memory.

    `control` is a gloo group with a long timeout, for all that waits for rank 0's disk or for the orchestrator.
    """

    rank: int
    size: int
    device: torch.device
    control: Any
    interrupt: Interrupt
    store: str  # host:port of rank 0's TCPStore, which other processes can join
    timeout_s: float = 1800.0  # timeout of `control` [s]
    host: torch.device = _HOST  # device of offloaded state

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def decide(self, choice: int) -> int:
        """Broadcast rank 0's choice, and return it on every rank."""
        value = torch.tensor([choice])
        dist.broadcast(value, src=0, group=self.control)
        return int(value.item())

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def agree(self, error: Exception | None, doing: str) -> None:
        """Raise RankError on every rank if any rank passes an error."""
        errors = self.collect(str(error) if error else None)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        if failed:
            raise RankError(f"{doing} failed: {'; '.join(failed)}") from error

    def attempt(self, work: Callable[[], T], doing: str) -> T:
        """Run this rank's part of some work. Raise RankError on every rank if any part raises OSError or ValueError."""
        done: list[T] = []
        failure = None
        try:
            done.append(work())
        except (OSError, ValueError) as error:
            failure = error
        self.agree(failure, doing)
        return done[0]

    def collect(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, value: T) -> T:
        """Broadcast rank 0's value, and return it on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over all ranks, in place, and return them."""
        dist.all_reduce(values)
        return values

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of the GPU, or of the process on CPU [bytes]."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def forget_peak_memory(self) -> None:
        """Reset the peak memory of a GPU, so that `peak_memory_bytes` counts from now on."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def allocation_retries(self) -> int:
        """Return the number of CUDA allocator retries so far. Each one flushes the cache, which is slow."""
        return int(torch.cuda.memory_stats()["num_alloc_retries"]) if self.device.type == "cuda" else 0

    def tighten(self, timeout_s: float, dims: ParallelDims) -> None:
        """Set the timeout of the training step's collectives to `timeout_s`. A collective."""
        self.barrier()  # a slow rank may still be in a collective that needs the old timeout
        meshes = dims.get_all_one_dimensional_meshes().values()
        for group in [None, *(mesh.get_group() for mesh in meshes)]:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)

    def close(self) -> None:
        dist.destroy_process_group()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device. From pinned memory, so that the host does not wait for the device's queue."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostCopy:
    """An asynchronous copy of a tensor to the host. Reading it waits for the copy, but not for later device work."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._copied = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()

    def tolist(self) -> list[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers


def host_memory(device: torch.device) -> Callable[[int], NDArray[np.uint8]]:
    """Return an allocator of byte buffers, pinned for a GPU. Callers must keep a buffer until its copy is done."""
    if device.type != "cuda":
        return lambda size: np.empty(size, np.uint8)

    def pinned(size: int) -> NDArray[np.uint8]:
        with torch.cuda.device(device):  # new threads start with device 0
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()

    return pinned


def join(interrupt: Interrupt, timeout_s: float, host_tensors: bool = False) -> World:
    """Join the process groups described by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    `timeout_s` is that of the control group, and of all others until `tighten` [s]. `host_tensors`: meshes also reduce
    tensors in host memory.
    """
    device = torch.device("cpu")
    if not compat.ON_CPU:
        if torch.cuda.device_count() == 1:
            os.environ["LOCAL_RANK"] = "0"  # each rank sees only its own GPU, and mesh setup reads this variable
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        _pin_to_near_cores(device)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = serve_store(host, port) if os.environ["RANK"] == "0" else None
    gate_port = rendezvous.tunnel(host, port, timeout_s)
    with _store_behind_gate(gate_port):
        size = dist_utils.init_distributed(
            CommConfig(init_timeout_seconds=int(timeout_s), trace_buf_size=0),
            enable_cpu_backend=host_tensors and device.type == "cuda",
        )
    # A GPU collective would busy-wait, and its watchdog would kill a process that waits for a disk.
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    interrupt.share(store or dist.TCPStore("127.0.0.1", gate_port, is_master=False))
    report_collectives(liveness())
    return World(dist.get_rank(), size, device, control, interrupt, f"{host}:{port}", timeout_s)


def alone() -> World:
    """Make this process the only rank of a World, without a TCPStore that others could join."""
    device = torch.device("cpu") if compat.ON_CPU else torch.device("cuda", 0)
    store = dist.HashStore()
    dist.init_process_group("gloo" if compat.ON_CPU else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    return World(0, 1, device, dist.group.WORLD, Interrupt(), "")


def bound_memory(device: torch.device, share: float) -> None:
    """Limit this rank to a fraction (0 to 1) of the memory of a GPU that it shares with an engine."""
    # PyTorch caches freed memory. Without a limit, an engine could not restart: vLLM needs its whole share to be free.
    total = torch.cuda.get_device_properties(device).total_memory
    outside = CONTEXT_BYTES + ENGINE_CONTEXT_BYTES  # memory that torch's allocator does not count
    torch.cuda.set_per_process_memory_fraction(max(0.0, share - outside / total), device)


def _pin_to_near_cores(device: torch.device) -> None:
    # Bind before large allocations, so that their pages come from the GPU's NUMA node.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count())
    try:
        affinity = cpu_affinity.move_near(cpu_affinity.pci_address(device.index), ranks)
    except OSError as error:
        log.warning("cannot find the cores nearest to GPU %d: %s", device.index, error)
        return
    torch.set_num_threads(min(torch.get_num_threads(), affinity.threads))
    log.info("%s; torch uses %d", affinity, torch.get_num_threads())


@contextmanager
def _store_behind_gate(port: int) -> Iterator[None]:
    """Make torch use the existing store, through a local gate that presents the run's secret."""
    # Without these variables, torch would create an unprotected store on rank 0. They are restored at the end, so that
    # child processes do not inherit them.
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    old_values = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


COUNT_PERIOD_S = 1.0
# Description of process groups whose ranks exchange different numbers of messages. Their messages are not counted.
UNEQUAL = "unequal"


def count_collectives() -> int:
    """Return the number of collectives that this rank has started in all process groups.

    The count is equal on all ranks that are in step, because every group numbers its own collectives.
    """
    return sum(_count(group) for group in list(dist.distributed_c10d._world.pg_map))


def _count(group: Any) -> int:
    if group.group_desc == UNEQUAL:
        return 0
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0  # a mesh dimension of size 1 has a group without a communicator


def report_collectives(liveness: LivenessReporter) -> None:
    """Report the count with the heartbeats, from a thread, because a rank in a collective cannot report anything."""
    threading.Thread(target=_report_collectives, args=(liveness,), name="collectives", daemon=True).start()


def _report_collectives(liveness: LivenessReporter) -> None:
    while dist.is_initialized():
        liveness.count_collectives(count_collectives())
        time.sleep(COUNT_PERIOD_S)

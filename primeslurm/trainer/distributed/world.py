"""The trainer's ranks: process groups, device, and what rank 0 decides for all."""

from __future__ import annotations

import logging
import os
import resource
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
from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.distributed import collective_count, cores
from primeslurm.trainer.loops.interrupt import Interrupt
from primeslurm.wire.transport import rendezvous
from primeslurm.wire.transport.rendezvous_store import serve_store

log = logging.getLogger(__name__)
T = TypeVar("T")
_HOST = torch.device("cpu")


class RankError(Exception):
    """Something failed on one rank; every rank raises it, so that none waits for another."""


@dataclass(frozen=True)
class World:
    """This rank's place among the ranks.

    `control` is a gloo group with a long time-out, for everything that waits on rank 0's disk or on the orchestrator:
    a GPU collective would spin meanwhile, and its watchdog would end the process.
    """

    rank: int
    size: int
    device: torch.device
    control: Any
    interrupt: Interrupt
    store: str
    """host:port of rank 0's store, which other processes can join."""
    patience_s: float = 1800.0
    """Time-out of `control`, in seconds."""
    host: torch.device = _HOST
    """Where offloaded states are."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def decide(self, choice: int) -> int:
        """Return rank 0's choice, on every rank."""
        value = torch.tensor([choice])
        dist.broadcast(value, src=0, group=self.control)
        return int(value.item())

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self.control)

    def agree(self, error: Exception | None, doing: str) -> None:
        """Raise RankError on every rank if any rank brings an error."""
        errors = self.collect(str(error) if error else None)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        if failed:
            raise RankError(f"{doing} failed: {'; '.join(failed)}") from error

    def attempt(self, work: Callable[[], T], doing: str) -> T:
        """Do this rank's part of something. Raises RankError on every rank if any part fails (OSError, ValueError)."""
        done: list[T] = []
        failure = None
        try:
            done.append(work())
        except (OSError, ValueError) as error:
            failure = error
        self.agree(failure, doing)
        return done[0]

    def collect(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, value: T) -> T:
        """Return rank 0's value, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over all ranks; `values` is changed to it."""
        dist.all_reduce(values)
        return values

    def peak_memory_bytes(self) -> int:
        """Return the most memory used so far: of the GPU, or of the process on CPU."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def allocation_retries(self) -> int:
        """Return how often so far a GPU's memory was full, and what was kept for later had to be given back; slow."""
        return int(torch.cuda.memory_stats()["num_alloc_retries"]) if self.device.type == "cuda" else 0

    def tighten(self, timeout_s: float, dims: ParallelDims) -> None:
        """Have collectives of steps fail after so long, from now on. All ranks call it together."""
        self.barrier()  # or a slow rank would still be at what may take longer
        meshes = dims.get_all_one_dimensional_meshes().values()
        for group in [None, *(mesh.get_group() for mesh in meshes)]:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)

    def close(self) -> None:
        """Leave the process groups."""
        dist.destroy_process_group()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device. It is pinned first, or the host would wait for what the device has yet to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostCopy:
    """Numbers on their way from a device. Who reads them waits for them, but not for what the device does next."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._numbers, self._arrived = tensor, None
        if tensor.is_cuda:
            self._numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._numbers.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.current_stream().record_event()

    def tolist(self) -> list[Any]:
        """Return them, as a tensor does."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[Any] = self._numbers.tolist()
        return numbers


def host_memory(device: torch.device) -> Callable[[int], NDArray[np.uint8]]:
    """What makes room for so many bytes that go to a device: pinned, where that is a GPU.

    Whoever copies from it asynchronously keeps it until that is done.
    """
    if device.type != "cuda":
        return lambda size: np.empty(size, np.uint8)

    def pinned(size: int) -> NDArray[np.uint8]:
        with torch.cuda.device(device):  # other threads have device 0
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()

    return pinned


def join(interrupt: Interrupt, patience_s: float, host_tensors: bool = False) -> World:
    """Join the job described by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Args:
        interrupt: is told of the others' signals.
        patience_s: longest time that ranks wait for one another: for rank 0 between steps, and until `tighten` for all.
        host_tensors: whether meshes must also reduce tensors in host memory.
    """
    device = torch.device("cpu")
    if not compat.ON_CPU:
        if torch.cuda.device_count() == 1:
            os.environ["LOCAL_RANK"] = "0"  # each rank sees only its own GPU; mesh set-up reads this variable
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        _move_near(device)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = serve_store(host, port) if os.environ["RANK"] == "0" else None
    way = rendezvous.tunnel(host, port, patience_s)
    with _store_at(way):
        size = dist_utils.init_distributed(
            CommConfig(init_timeout_seconds=int(patience_s), trace_buf_size=0),
            enable_cpu_backend=host_tensors and device.type == "cuda",
        )
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
    interrupt.share(store or dist.TCPStore("127.0.0.1", way, is_master=False))
    collective_count.tell(liveness())
    return World(dist.get_rank(), size, device, control, interrupt, f"{host}:{port}", patience_s)


def bound_memory(device: torch.device, share: float) -> None:
    """Limit this rank to its share of the memory of a GPU that an engine uses, too.

    Torch keeps freed memory for later. Without a limit it could keep so much that an engine cannot restart: vLLM starts
    only if its whole share is free.

    Args:
        device: the GPU.
        share: of its memory, 0 to 1.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    outside = CONTEXT_BYTES + ENGINE_CONTEXT_BYTES  # what torch's allocator does not count
    torch.cuda.set_per_process_memory_fraction(max(0.0, share - outside / total), device)


def _move_near(device: torch.device) -> None:
    """Run on the cores nearest to a GPU, with this rank's share of threads, before there is much in host memory."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count())
    try:
        place = cores.move_near(cores.pci_address(device.index), ranks)
    except OSError as error:
        log.warning("the cores nearest to GPU %d are not known: %s", device.index, error)
        return
    torch.set_num_threads(min(torch.get_num_threads(), place.threads))
    log.info("%s; torch uses %d", place, torch.get_num_threads())


@contextmanager
def _store_at(way: int) -> Iterator[None]:
    """Have torch meet at a store that is there already, behind a gate that asks for the run's secret.

    torch makes one of its own on rank 0 otherwise. Processes that are started later do not inherit it.
    """
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(way), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    before = {name: os.environ.get(name) for name in known}
    os.environ |= known
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

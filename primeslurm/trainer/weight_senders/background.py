"""Helpers to publish weights while the next step trains: a copy of the policy, and a thread with its own group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.distributed.world import World

HEARTBEAT_S = 1.0  # between two heartbeats of a training loop that waits for a thread
ALIGNMENT = 16  # alignment of tensors in a copy of the policy [bytes]
Tensors = dict[str, torch.Tensor]


def beside(world: World) -> World:
    """Return a copy of `world` with a new control group, for a background thread. A collective."""
    # Collectives of a thread must not mix with those of the training loop.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s))
    return replace(world, control=group)


class PolicyCopy:
    """A copy of a rank's exported tensors in `size` bytes of memory, which the next version reuses.

    The memory is that of `device`, or of the host if `pinned`.
    """

    def __init__(self, size: int, device: torch.device | None = None, *, pinned: bool = False) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._tensors: list[Tensors] = []
        self._copied: torch.cuda.Event | None = None

    def take(self, tensors: Iterable[Tensors]) -> None:
        """Start to copy the tensors of each layer. Later work on the current stream may overwrite the originals."""
        self._tensors, end = [], 0
        for exported in tensors:
            copies = {}
            for name, tensor in exported.items():
                place = self._memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[name] = place.copy_(tensor, non_blocking=True)
                end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            self._tensors.append(copies)
        if self._memory.is_cuda or self._memory.is_pinned():
            self._copied = torch.cuda.current_stream().record_event()

    def read(self) -> list[Tensors]:
        """Wait for the copy, and return its tensors in the same layers as `take` got them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


class Background:
    """Runs at most one action at a time in a thread, while training continues."""

    def __init__(self) -> None:
        self._running: Future[None] | None = None

    def start(self, action: Callable[[], None]) -> None:
        """Start an action in a daemon thread: a process that has failed must not wait for it, or for a full disk."""
        future = self._running = Future()

        def run() -> None:
            try:
                action()
            except BaseException as error:  # raised by `finish`
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name="publish", daemon=True).start()

    def pending(self) -> Future[None] | None:
        """Return the last action if it still runs, or has failed."""
        running = self._running
        return None if running is None or (running.done() and running.exception() is None) else running

    def finish(self) -> None:
        """Wait for the last action, and raise its error."""
        running, self._running = self._running, None
        if running is not None:
            while not futures.wait((running,), HEARTBEAT_S).done:
                liveness().heartbeat()
            running.result()

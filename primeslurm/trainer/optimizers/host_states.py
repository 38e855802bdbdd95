"""Optimizer state in host memory, copied to the GPU in chunks for the update.

While one chunk is updated, the state of the next one arrives and the state of the previous one leaves. The three device
buffers exist only during the optimizer step, when there are no activations. Each chunk has an ordinary optimizer, so
results and checkpoints are bit-identical to those without offload.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from primeslurm.nn import compat
from primeslurm.recipe.sections.trainer import STATE_BUFFERS, STATE_CHUNK_BYTES
from primeslurm.trainer.optimizers.container import Named, Optimizers, add_missing_state

_ALIGNED = 256
# cudaHostRegisterPortable: pinned for all CUDA contexts of the process
_PORTABLE = 1
# A parameter, and the name of one of its state tensors
StateKey = tuple[torch.Tensor, str]


def chunks(named: Iterable[Named]) -> Iterator[list[Named]]:
    """Group parameters in order, with at most `STATE_CHUNK_BYTES` of local shards per chunk."""
    chunk: list[Named] = []
    size = 0
    for name, parameter in named:
        nbytes = _local(parameter).nbytes
        if chunk and size + nbytes > STATE_CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, parameter))
        size += nbytes
    if chunk:
        yield chunk


class _Chunk:
    """The optimizer of a chunk of parameters. Its state is in host memory, except for the step counts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._hosts: dict[StateKey, torch.Tensor] = {}
        self._device_state: dict[StateKey, torch.Tensor] = {}
        self.bytes = 0  # size of its state in a device buffer

    def keep(self) -> None:
        """Move optimizer state that the first step or a load has created on the device to host memory."""
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.ndim:
                    continue
                host = self._hosts.get((parameter, name))
                if host is None:
                    host = compat.with_local(value, host_copy(_local(value)))
                    self._hosts[parameter, name] = host
                    self.bytes += _aligned(_local(host).nbytes)
                elif value is not host:
                    _local(host).copy_(_local(value))
                state[name] = host

    def fetch(self, buffer: torch.Tensor) -> None:
        """Copy the state to a device buffer, on the current stream."""
        self._device_state = {}
        start = 0
        for key, host in self._hosts.items():
            local = _local(host)
            flat = buffer[start : start + local.nbytes].view(local.dtype)
            self._device_state[key] = flat.as_strided(local.shape, local.stride())
            self._device_state[key].copy_(local, non_blocking=True)
            start += _aligned(local.nbytes)

    def update(self) -> None:
        for key, on_device in self._device_state.items():
            self._set(key, compat.with_local(self._hosts[key], on_device))
        self.optimizer.step()
        for key in self._device_state:
            self._set(key, self._hosts[key])
        self.keep()

    def give_back(self) -> None:
        """Copy the fetched state back to host memory, on the current stream."""
        for key, on_device in self._device_state.items():
            _local(self._hosts[key]).copy_(on_device, non_blocking=True)
        self._device_state = {}

    def _set(self, key: StateKey, value: torch.Tensor) -> None:
        parameter, name = key
        self.optimizer.state[parameter][name] = value


class HostStates(Optimizers):
    """Optimizers, one per chunk of the parameters, whose state is in host memory."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        super().__init__(optimizers)
        self._chunks = [_Chunk(optimizer) for optimizer in optimizers]
        self._device = device
        cuda = device.type == "cuda"
        self._in = torch.cuda.Stream(device) if cuda else None
        self._out = torch.cuda.Stream(device) if cuda else None

    def step(self) -> None:
        computing = torch.cuda.current_stream(self._device) if self._in is not None else None
        size = max(chunk.bytes for chunk in self._chunks)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(STATE_BUFFERS)]
        _after(self._in, _reached(computing))  # other kernels may still use the memory of the new buffers
        arrived: list[Any] = []
        written_back: list[Any] = []

        def fetch(number: int) -> None:
            if number >= STATE_BUFFERS:
                _after(self._in, written_back[number - STATE_BUFFERS])
            with torch.cuda.stream(self._in):
                self._chunks[number].fetch(buffers[number % STATE_BUFFERS])
            arrived.append(_reached(self._in))

        fetch(0)
        for number, chunk in enumerate(self._chunks):
            if number + 1 < len(self._chunks):
                fetch(number + 1)
            _after(computing, arrived[number])
            chunk.update()
            _after(self._out, _reached(computing))
            with torch.cuda.stream(self._out):
                chunk.give_back()
            written_back.append(_reached(self._out))
        _after(computing, written_back[-1])  # before the buffers' memory is reused

    def state_dict(self) -> dict[str, Any]:
        for chunk in self._chunks:
            add_missing_state(chunk.optimizer)
            chunk.keep()
        if self._out is not None:
            self._out.synchronize()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for chunk in self._chunks:
            self._load(chunk.optimizer, state)
            chunk.keep()


def _reached(stream: Any) -> Any:
    return None if stream is None else stream.record_event()


def _after(stream: Any, event: Any) -> None:
    if stream is not None:
        stream.wait_event(event)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory, pinned if the tensor is on a GPU. Raises RuntimeError if CUDA cannot pin it."""
    # The memory is mapped and registered here, because torch's pinned allocator rounds sizes up to powers of two. With
    # hundreds of gigabytes that could waste nearly half.
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = mmap.mmap(-1, tensor.numel() * tensor.element_size())
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    flat.zero_()  # faults the pages in on the NUMA node of this thread, before the driver pins them
    if tensor.is_cuda:
        _pin(memory, flat)
    copied = flat.as_strided(tensor.shape, tensor.stride())
    copied.copy_(tensor)
    return copied


def _pin(memory: mmap.mmap, flat: torch.Tensor) -> None:
    runtime, address = torch.cuda.cudart(), flat.data_ptr()
    code = int(runtime.cudaHostRegister(address, flat.nbytes, _PORTABLE))
    if code:
        raise RuntimeError(f"CUDA cannot pin {flat.nbytes / 1e9:.2f} GB of host memory: error {code}")
    # The mapping lives as long as any view of the tensor, so it is unregistered when the last view is gone.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False

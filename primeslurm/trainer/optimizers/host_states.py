"""Optimizer state in host memory, brought to its parameters piece by piece for their update.

While one piece of the parameters is updated, the state of the next one arrives and that of the one before leaves, in
three buffers on the device: they are there for as long as the optimizer's step, when activations are not. Masters and
gradients stay on the device. The optimizers are the ordinary ones, each of a few parameters, so what they compute is
the same to the bit, and so is what they save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from primeslurm.nn import compat
from primeslurm.recipe.sections.trainer import STATE_BUFFERS, STATE_PIECE_BYTES
from primeslurm.trainer.optimizers.container import Named, Optimizers, add_missing_state
from primeslurm.trainer.optimizers.host_memory import host_copy

_ALIGNED = 256
Place = tuple[torch.Tensor, str]
"""A parameter, and the name of a part of its state."""


def pieces(named: Iterable[Named]) -> Iterator[list[Named]]:
    """Yield parameters in their order, as many together as `STATE_PIECE_BYTES` allow on this rank."""
    together: list[Named] = []
    size = 0
    for name, parameter in named:
        own = _local(parameter).nbytes
        if together and size + own > STATE_PIECE_BYTES:
            yield together
            together, size = [], 0
        together.append((name, parameter))
        size += own
    if together:
        yield together


class _Piece:
    """An optimizer of some parameters. Its state is in host memory, but for the number of its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._hosts: dict[Place, torch.Tensor] = {}
        self._there: dict[Place, torch.Tensor] = {}
        self.bytes = 0
        """That its state takes in a buffer."""

    def keep(self) -> None:
        """Take what is new in the optimizer's state to host memory: after its first step, or after a load."""
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.ndim:
                    continue
                host = self._hosts.get((parameter, key))
                if host is None:
                    host = compat.with_local(value, host_copy(_local(value)))
                    self._hosts[parameter, key] = host
                    self.bytes += _aligned(_local(host).nbytes)
                elif value is not host:
                    _local(host).copy_(_local(value))
                state[key] = host

    def fetch(self, buffer: torch.Tensor) -> None:
        """Copy its state into a buffer, on the current stream."""
        self._there = {}
        start = 0
        for place, host in self._hosts.items():
            local = _local(host)
            flat = buffer[start : start + local.nbytes].view(local.dtype)
            self._there[place] = flat.as_strided(local.shape, local.stride())
            self._there[place].copy_(local, non_blocking=True)
            start += _aligned(local.nbytes)

    def update(self) -> None:
        """Make the optimizer's step with the state that was fetched."""
        for place, there in self._there.items():
            self._set(place, compat.with_local(self._hosts[place], there))
        self.optimizer.step()
        for place in self._there:
            self._set(place, self._hosts[place])
        self.keep()

    def give_back(self) -> None:
        """Copy the state that was fetched back to host memory, on the current stream."""
        for place, there in self._there.items():
            _local(self._hosts[place]).copy_(there, non_blocking=True)
        self._there = {}

    def _set(self, place: Place, value: torch.Tensor) -> None:
        parameter, key = place
        self.optimizer.state[parameter][key] = value


class HostStates(Optimizers):
    """Optimizers whose state is in host memory.

    Args:
        optimizers: one for each piece of the parameters.
        device: that the parameters are on.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        super().__init__(optimizers)
        self._pieces = [_Piece(optimizer) for optimizer in optimizers]
        self._device = device
        cuda = device.type == "cuda"
        self._in = torch.cuda.Stream(device) if cuda else None
        self._out = torch.cuda.Stream(device) if cuda else None

    def step(self) -> None:
        """Update all parameters."""
        computing = torch.cuda.current_stream(self._device) if self._in is not None else None
        size = max(piece.bytes for piece in self._pieces)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(STATE_BUFFERS)]
        _after(self._in, _reached(computing))  # the buffers' memory was something else's, and the last step left in it
        arrived: list[Any] = []
        left: list[Any] = []

        def fetch(number: int) -> None:
            if number >= STATE_BUFFERS:
                _after(self._in, left[number - STATE_BUFFERS])
            with torch.cuda.stream(self._in):
                self._pieces[number].fetch(buffers[number % STATE_BUFFERS])
            arrived.append(_reached(self._in))

        fetch(0)
        for number, piece in enumerate(self._pieces):
            if number + 1 < len(self._pieces):
                fetch(number + 1)
            _after(computing, arrived[number])
            piece.update()
            _after(self._out, _reached(computing))
            with torch.cuda.stream(self._out):
                piece.give_back()
            left.append(_reached(self._out))
        _after(computing, left[-1])  # or others would have the buffers' memory too early

    def state_dict(self) -> dict[str, Any]:
        """Return state and settings by parameter name; tensors of the state are those in host memory."""
        for piece in self._pieces:
            add_missing_state(piece.optimizer)
            piece.keep()
        if self._out is not None:
            self._out.synchronize()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        for piece in self._pieces:
            self._load(piece.optimizer, state)
            piece.keep()


def _reached(stream: Any) -> Any:
    """What a stream has come to; None without one."""
    return None if stream is None else stream.record_event()


def _after(stream: Any, event: Any) -> None:
    """Have a stream wait for what another one has come to."""
    if stream is not None:
        stream.wait_event(event)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

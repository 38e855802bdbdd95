"""Bytes of live tensors, counted per operation: memory use without an allocator or a GPU.

It works with fake tensors, too, so that layers at full width need neither memory nor time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveMemory(TorchDispatchMode):
    """Counts every storage from its creation until its last reference is gone, without those of `besides`."""

    def __init__(self, besides: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        """Current bytes."""
        self.peak = 0
        """Largest number of bytes since it was last reset."""
        self._besides = [tensor.untyped_storage() for tensor in besides]
        self._seen: dict[int, Any] = {id(storage): storage for storage in self._besides}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, result)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            del self._seen[key]
            self.now -= size

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Passes:
    """Bytes in addition to parameters, their gradients, inputs and outputs."""

    forward: int
    """Peak of the forward pass."""
    kept: int
    """Kept between the two passes."""
    backward: int
    """Peak of the backward pass; 0 if there is none."""


def passes(module: torch.nn.Module, call: Callable[[], tuple[torch.Tensor, ...]], given: list[torch.Tensor]) -> Passes:
    """Measure a forward and a backward pass of `call` on `given`, without the parameters and gradients of `module`."""
    parameters = list(module.parameters())
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with LiveMemory([*given, *parameters, *gradients, *module.buffers()]) as memory:
        outputs = call()
        returned = sum(output.untyped_storage().nbytes() for output in outputs)
        forward, kept = memory.peak - returned, memory.now - returned
        if not any(output.requires_grad for output in outputs):
            return Passes(forward, kept, 0)
        starting = [torch.ones_like(output) for output in outputs]
        memory.peak = memory.now
        torch.autograd.backward(outputs, starting)
        return Passes(forward, kept, memory.peak - 2 * returned)

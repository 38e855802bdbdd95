"""Move the activations that checkpointing saves to host memory, until the backward pass needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class _Saved:
    """A saved tensor in host memory, or on its way there or back."""

    def __init__(self, tensor: torch.Tensor, layer: _Layer) -> None:
        self.layer = layer
        self._device = tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._fetched: torch.Tensor | None = None

    def allocate(self) -> None:
        # Called on the computing stream, so that the caching allocator assigns the memory to that stream.
        self._fetched = torch.empty_like(self._host, device=self._device)

    def fetch(self) -> None:
        assert self._fetched is not None
        self._fetched.copy_(self._host, non_blocking=True)

    def take(self) -> torch.Tensor:
        if self._fetched is None:
            self.allocate()
            self.fetch()
        tensor, self._fetched = self._fetched, None
        assert tensor is not None
        return tensor


class _Layer:
    """The tensors that one layer's forward pass saved."""

    def __init__(self, before: _Layer | None) -> None:
        self.before = before
        self.weights: set[int] = set()
        self.saved: list[_Saved] = []
        self.leaving: list[torch.Tensor] = []  # keeps the device memory alive until it has been copied
        self.copied: Any = None
        self.returned: Any = None


class ActivationOffload:
    """Offloads the saved activations of a model's layers. Each forward pass must be followed by its backward pass."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if cuda else None
        self._back = torch.cuda.Stream(device) if cuda else None
        self._layer: _Layer | None = None

    # Copies overlap with computation: to the host while the next layer computes, and back while the backward pass is at
    # the layer after.
    def install(self, model: Any) -> None:
        layers = list(model.layers.values())
        for index, layer in enumerate(layers):
            layer.forward = self._around(layer, layer.forward, first=index == 0)

    def _around(self, module: torch.nn.Module, forward: Callable[..., Any], first: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            layer = self._layer = _Layer(None if first else self._layer)
            self._limit_device_copies(layer)
            layer.weights = _storages(module)
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                result = forward(*args, **kwargs)
            if self._out is not None:
                layer.copied = self._out.record_event()
            return result

        return run

    def _limit_device_copies(self, layer: _Layer) -> None:
        # Wait for the layer before the last one, so that at most two layers' activations are on the device: those being
        # copied, and those of the layer that computes.
        previous = layer.before.before if layer.before is not None else None
        if previous is not None and previous.copied is not None:
            torch.cuda.current_stream().wait_event(previous.copied)
            previous.leaving.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        layer = self._layer
        assert layer is not None
        # FSDP manages weights, and index tensors are too small to be worth a copy.
        if isinstance(tensor, DTensor) or not tensor.is_floating_point() or _storage(tensor) in layer.weights:
            return tensor
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream())
            layer.leaving.append(tensor.detach())
        with torch.cuda.stream(self._out):
            saved = _Saved(tensor.detach(), layer)
        layer.saved.append(saved)
        return saved

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        layer = saved.layer
        self._bring_back(layer)
        if layer.before is not None:
            self._bring_back(layer.before)
        if layer.returned is not None:
            torch.cuda.current_stream().wait_event(layer.returned)
        return saved.take()

    def _bring_back(self, layer: _Layer) -> None:
        waiting, layer.saved = layer.saved, []
        if self._back is None or not waiting:
            return
        computing = torch.cuda.current_stream()
        computing.wait_event(layer.copied)
        layer.leaving.clear()
        for saved in waiting:
            saved.allocate()
        self._back.wait_stream(computing)
        with torch.cuda.stream(self._back):
            for saved in waiting:
                saved.fetch()
            layer.returned = self._back.record_event()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # not data_ptr(): placeholder tensors have no memory


def _storages(module: torch.nn.Module) -> set[int]:
    # Attributes, because a rank that holds the model alone computes with copies of its parameters.
    parameters = [getattr(m, name) for m in module.modules() for name, _ in m.named_parameters(recurse=False)]
    tensors = [*parameters, *module.buffers()]
    return {_storage(tensor.to_local() if isinstance(tensor, DTensor) else tensor) for tensor in tensors}

"""The experts that an engine worker holds, and a fast way to load all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from primeslurm.wire.weight_transfer.catalogue import Experts, Named


@dataclass(frozen=True)
class HeldExperts:
    """Which experts a worker holds, and in which order."""

    wanted: Experts  # Experts to request from the trainer; None for all, also if experts move between workers
    order: tuple[int, ...] | None  # Expert of each row of vLLM's parameters; None if stacks cannot be loaded

    def loadable(self, item: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield received tensors as the model's `load_weights` takes them: whole stacks, or one matrix at a time."""
        # vLLM's loader takes one matrix per call: half a millisecond of Python for a copy of microseconds. Given a
        # stack [experts, rows, columns] under the name of one expert, it fills the whole parameter. Tensor parallelism,
        # quantisation and the reload's element count stay correct (tests/engine/test_experts.py).
        if item.tensor.ndim == 3 and item.experts and item.experts == self.order:
            return iter([(item.name.format(item.experts[0]), item.tensor)])
        return item.each()


def held_experts(model: torch.nn.Module, enable_eplb: bool) -> HeldExperts:
    """Return the experts that a worker's model holds. With `enable_eplb` experts move between workers."""
    layers = _layers(model)
    if enable_eplb or not layers:
        return HeldExperts(None, None)
    slots = {_by_slot(layer) for layer in layers}
    if len(slots) > 1:
        return HeldExperts(None, None)
    order = slots.pop()
    wanted = None if any(layer.expert_map_manager.expert_map is None for layer in layers) else frozenset(order)
    is_whole = order == tuple(sorted(order)) and not any(map(_shared_beside, layers))
    return HeldExperts(wanted, order if is_whole else None)


def incomplete_experts(model: torch.nn.Module) -> list[str]:
    """Return the names of layers that lack some of their experts since the layerwise reload began."""
    # vLLM counts the copied elements of each layer. Padded layers are never complete, because padding is not loaded.
    counted = (layer for layer in _layers(model) if not (_is_padded(layer) or _shared_beside(layer)))
    return [layer.layer_name for layer in counted if get_layerwise_info(layer).can_load()]


def _layers(model: torch.nn.Module) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def _by_slot(layer: RoutedExperts) -> tuple[int, ...]:
    """Return the global expert numbers of a layer, in the order of the worker's rows."""
    slots = layer.expert_map_manager.expert_map
    if slots is None:
        return tuple(range(layer.global_num_experts))
    held = (slots >= 0).nonzero().flatten()
    return tuple(held[slots[held].argsort()].tolist())


def _shared_beside(layer: RoutedExperts) -> bool:
    """Return whether vLLM's parameters of a layer also have rows for shared experts."""
    return layer.expert_map_manager.num_fused_shared_experts > 0


def _is_padded(layer: RoutedExperts) -> bool:
    """Return whether vLLM's parameters of a layer are larger than the tensors that are loaded into them."""
    config = layer.moe_config
    return (
        config.tp_shard_with_padding
        or config.hidden_dim != config.hidden_dim_unpadded
        or config.intermediate_size_per_partition * config.tp_size != config.intermediate_size
    )

"""The experts that an engine's worker holds, and how it loads a stack of them at once.

vLLM's loader of expert weights takes one matrix of one expert a call: half a millisecond of Python, while copying the
matrix takes microseconds. Given a matrix for each of a worker's experts, [experts, rows, columns], under the name of
one of them, the same loader fills the whole parameter, with all that it does for tensor parallelism and quantisation,
and vLLM's layerwise reload counts as many elements. `tests/engine/test_experts.py` fails if vLLM changes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from primeslurm.wire.weight_transfer.catalogue import Experts, Named


@dataclass(frozen=True)
class HeldExperts:
    """The experts of a worker.

    Args:
        wanted: what to ask for; None for all, also if they move between workers.
        order: whose each row of vLLM's parameters is, if these can be loaded whole.
    """

    wanted: Experts
    order: tuple[int, ...] | None

    def loadable(self, item: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Make of what a trainer sent what the model's `load_weights` takes: whole stacks, and all else one by one."""
        if item.tensor.ndim == 3 and item.experts and item.experts == self.order:
            return iter([(item.name.format(item.experts[0]), item.tensor)])
        return item.each()


def held_experts(model: torch.nn.Module, enable_eplb: bool) -> HeldExperts:
    """Find out which experts a worker holds of a model.

    Args:
        model: the worker's part of it.
        enable_eplb: experts move between workers.
    """
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
    """Layers whose experts were not given entirely since the layerwise reload began.

    vLLM counts what it has copied, and takes a layer for loaded when all was. That tells nothing of a layer whose
    parameters are padded: padding is never loaded.
    """
    counted = (layer for layer in _layers(model) if not (_is_padded(layer) or _shared_beside(layer)))
    return [layer.layer_name for layer in counted if get_layerwise_info(layer).can_load()]


def _layers(model: torch.nn.Module) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def _by_slot(layer: RoutedExperts) -> tuple[int, ...]:
    """Global numbers of a layer's experts, in the order of the worker's slots."""
    slots = layer.expert_map_manager.expert_map
    if slots is None:
        return tuple(range(layer.global_num_experts))
    held = (slots >= 0).nonzero().flatten()
    return tuple(held[slots[held].argsort()].tolist())


def _shared_beside(layer: RoutedExperts) -> bool:
    """Whether parameters have rows for shared experts, too."""
    return layer.expert_map_manager.num_fused_shared_experts > 0


def _is_padded(layer: RoutedExperts) -> bool:
    """Whether parameters are larger than what is loaded into them."""
    config = layer.moe_config
    return (
        config.tp_shard_with_padding
        or config.hidden_dim != config.hidden_dim_unpadded
        or config.intermediate_size_per_partition * config.tp_size != config.intermediate_size
    )

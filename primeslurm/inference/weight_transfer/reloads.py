"""What vLLM's layerwise reload does not do of some model families, done beside it.

The reload puts a model's parameters on the meta device and replays there what their loaders are given. So it needs a
loader with a name for each of them, and loses what a model's `load_weights` copies without one. Re-examine this at
every change of the pinned version: `tests/engine/test_reloads.py` updates a model of each family.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssModel, OAIAttention

from primeslurm.inference.guards import expect

SELECTION_BIAS = "e_score_correction_bias"


def begin(model: torch.nn.Module) -> None:
    """Begin a layerwise reload of a model."""
    for parameter in model.parameters():
        _name_loader(parameter)
    gpt_oss = [module for module in model.modules() if isinstance(module, GptOssModel)]
    experts = [layer for each in gpt_oss for layer in each.modules() if isinstance(layer, RoutedExperts)]
    for layer in experts:
        _copy_whole(layer)
    kept = [(layer, layer.sinks) for each in gpt_oss for layer in each.modules() if isinstance(layer, OAIAttention)]
    initialize_layerwise_reload(model)
    for layer in experts:
        _load_copies(layer)
    for layer, sinks in kept:
        # `load_weights` writes into them, and nothing is computed of them: they are not loaded anew, but in place.
        layer.register_parameter("sinks", sinks)
        get_layerwise_info(layer).reset()


def load_selection_bias() -> None:
    """Make experts take the bias of their selection where that is theirs by name, as Laguna's is.

    vLLM drops it, at an engine's start, too, and selects without it.
    """
    original = expect(RoutedExperts, "load_weights", ("self", "weights"))

    @functools.wraps(original)
    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        taken: list[str] = []

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == SELECTION_BIAS and self.e_score_correction_bias is not None:
                    default_weight_loader(self.e_score_correction_bias, tensor)
                    taken.append(name)
                else:
                    yield name, tensor

        yield from original(self, others())
        yield from taken

    RoutedExperts.load_weights = load_weights


def _name_loader(parameter: torch.nn.Parameter) -> None:
    """The reload asks every loader for its name, which that of MiniMax's norms over queries and keys has not."""
    loader = getattr(parameter, "weight_loader", None)
    if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
        loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def _copy_whole(layer: RoutedExperts) -> None:
    """Replay what is given to experts' parameters as a copy: GPT-OSS cuts it to the worker's part beforehand."""
    parameters, _ = get_layerwise_info(layer).restore_metadata
    for parameter in parameters.values():
        parameter.weight_loader = default_weight_loader


def _load_copies(layer: RoutedExperts) -> None:
    """Give the loader what GPT-OSS copies into experts' parameters, which is lost on the meta device."""
    for parameter in layer.parameters(recurse=False):
        parameter.copy_ = functools.partial(_load_once, parameter)


def _load_once(parameter: Any, tensor: torch.Tensor) -> None:
    del parameter.copy_  # the real parameter inherits its attributes, and is copied into like any
    parameter.weight_loader(parameter, tensor)

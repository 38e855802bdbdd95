"""How an engine takes a new policy: the base of our vLLM weight-transfer engines.

vLLM calls, with generation paused: `start_weight_update`, `update_weights` (once or more), `finish_weight_update`.
Whatever the transport, tensors arrive under Hugging Face names and go through the model's own `load_weights` within
vLLM's layerwise reload, so any device and any tensor- or expert-parallel layout takes the same policy.

What the reload does not do of some model families is done beside it (`_begin_reload` and below). It puts a model's
parameters on the meta device and replays there what their loaders are given. So it needs a loader with a name for each
of them, and loses what a model's `load_weights` copies without one. Re-examine this at every change of the pinned
version: `tests/engine/test_reloads.py` updates a model of each family.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssModel, OAIAttention
from vllm.platforms import current_platform

from primeslurm.inference.guards import expect
from primeslurm.inference.weight_transfer.experts import incomplete_experts
from primeslurm.nn.block_sizes import FP8_BLOCK
from primeslurm.testbed.cpu_engine import patches
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

_ELEMENTS_AT_ONCE = 2**25
"""How much of a stack of FP8 weights is in float32 at a time."""


class PolicyError(RuntimeError):
    """A published policy is incomplete or does not fit the model. The engine must not resume on it."""


class LayerwiseTransferEngine(WeightTransferEngine):
    """Base of all transports: layerwise reload, and the proof that every parameter was given.

    A subclass implements `init_transfer_engine` and `receive_weights`, which hands its tensors to `load`.
    """

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded anew."""
        self._roll_back_partial_layers()
        first_names = {name for name, _ in self.model.named_parameters()}
        every_name = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        _begin_reload(self.model)  # of a parameter with two names it makes two
        aliases = every_name - first_names
        given_once = {name for name, _ in self.model.named_parameters()} - aliases
        self._expected = given_once - self._tied_parameters() - set(_attention_scales(self.model))
        self._loaded: set[str] = set()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one part of the policy (all of it, for transports that do not split it)."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Put the new weights in place.

        Raises:
            PolicyError: a parameter, or an expert of one, was not given.
        """
        missing = self._expected - self._loaded
        if missing:
            raise PolicyError(f"{len(missing)} parameters were not given: {some(missing)}")
        if partial := set(incomplete_experts(self.model)):
            raise PolicyError(f"experts of {len(partial)} layers were not all given: {some(partial)}")
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            patches.refresh_tied_lm_heads(self.model)

    def shutdown(self) -> None:
        """Do nothing: nothing outlives an update."""

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load (Hugging Face name, tensor) pairs, in any order; host tensors are copied shard by shard.

        A matrix for each of the worker's experts may come as one stack, as `HeldExperts.loadable` makes it.
        """
        if not self._loads_fp8():
            tensors = dequantised(tensors, self.model_config.dtype)
        self._loaded |= self.model.load_weights(tensors)

    def has_tied_embeddings(self) -> bool:
        """Tell whether the head is the embedding.

        Of a model with parts, the whole's config says so, if it says anything.
        """
        whole, text = self.model_config.hf_config, self.model_config.hf_text_config
        return bool(getattr(whole, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False)))

    def _loads_fp8(self) -> bool:
        """Whether the model was built for an FP8 checkpoint; if not, vLLM quantises what is loaded, or does not."""
        return isinstance(self.vllm_config.quant_config, Fp8Config)

    def _roll_back_partial_layers(self) -> None:
        # A failed update leaves half-filled layers that vLLM would go on filling: the retry's tensors would be counted
        # on top of the old ones, and a layer be taken for complete before it is. Finalizing a layer that nothing was
        # loaded into puts its former tensors back.
        infos = [get_layerwise_info(layer) for layer in self.model.modules()]
        partial = [info for info in infos if info.can_load()]
        for info in partial:
            info.load_numel = 0
            info.loaded_weights.clear()
        if partial:
            finalize_layerwise_reload(self.model, self.model_config)

    def _tied_parameters(self) -> set[str]:
        if not self.has_tied_embeddings():
            return set()
        heads = [name for name, module in self.model.named_modules() if isinstance(module, ParallelLMHead)]
        return {f"{head}.weight" for head in heads}


def _attention_scales(model: torch.nn.Module) -> Iterator[str]:
    """Names of the scales that quantised attention has: where a policy brings none, they stay as they are.

    A model that is built for an FP8 checkpoint has them, for a cache that may be in FP8, too.
    """
    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            yield from (f"{name}.{scale}" for scale, _ in module.named_parameters(recurse=False))


def some(names: set[str]) -> str:
    """Name the first few of many names, for an error."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (" ..." if len(names) > len(shown) else "")


def dequantised(tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights in block-scaled FP8 as weights of `dtype`; all else as it is.

    Raises:
        PolicyError: a weight came without its scales, or scales without their weight.
    """
    alone: dict[str, torch.Tensor] = {}  # weights and scales whose other half has not come yet
    for name, tensor in tensors:
        weight = name.removesuffix(FP8_SCALE)
        if weight == name and tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
        elif (other := alone.pop(weight, None)) is None:
            alone[weight] = tensor
        else:
            pair = (other, tensor) if weight != name else (tensor, other)
            yield weight, _unscaled(*pair, dtype)
    if alone:
        raise PolicyError(f"FP8 weights and their scales do not match: {some(set(alone))}")


def _unscaled(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of a matrix, or of a stack of them; some at a time, as engines have little memory to spare."""
    rows, columns = weight.shape[-2:]
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    at_once = max(1, _ELEMENTS_AT_ONCE // (rows * columns))
    stacks = (tensor.view(-1, *tensor.shape[-2:]).split(at_once) for tensor in (result, weight, scales))
    for target, data, scale in zip(*stacks, strict=True):
        wide = scale.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
        target.copy_(data.float() * wide[..., :rows, :columns])
    return result


SELECTION_BIAS = "e_score_correction_bias"


def _begin_reload(model: torch.nn.Module) -> None:
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

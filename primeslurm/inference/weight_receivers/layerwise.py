"""Base class of the vLLM weight-transfer backends: loads a new policy into a running model.

While generation is paused, vLLM calls `start_weight_update`, `update_weights` (once or more) and
`finish_weight_update`. With every transport, tensors have Hugging Face names and go through the model's own
`load_weights`, inside vLLM's layerwise reload. So one policy fits any device and any tensor- or expert-parallel layout.
"""

from __future__ import annotations

import functools
import re
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

from primeslurm.inference.patches import expect
from primeslurm.inference.weight_receivers.experts import incomplete_experts
from primeslurm.nn.block_sizes import FP8_BLOCK
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE, layers_ahead

# Suffixes of tensors of a draft layer that repeat the embedding and the head, whose modules engines share
_SHARED = (".embed_tokens.weight", ".shared_head.head.weight")
# Elements of FP8 weights that are converted to float32 at a time, to save memory.
_ELEMENTS_AT_ONCE = 2**25


class PolicyError(RuntimeError):
    """A policy is incomplete or does not fit the model. The engine must not resume with it."""


class LayerwiseTransferEngine(WeightTransferEngine):
    """Base of all transports: reloads the model, and checks that every parameter was loaded.

    Subclasses implement `init_transfer_engine` and `receive_weights`, which passes its tensors to `load`. A policy may
    come with a draft layer; if a policy has none, the engine keeps its current ones.
    """

    draft_layers: Any = None
    """vLLM's model of the draft layers. None: the engine does not draft with them."""

    def start_weight_update(self) -> None:
        self._roll_back_partial_layers()
        aliases = _aliases(self.model)
        _begin_reload(self.model)  # turns a parameter with two names into two parameters
        given_once = {name for name, _ in self.model.named_parameters()} - aliases
        self._expected = given_once - self._tied_parameters() - set(_attention_scales(self.model))
        self._loaded: set[str] = set()
        self._drafting: list[tuple[str, torch.Tensor]] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Activate the new weights. Raise PolicyError if the policy lacked parameters or experts."""
        missing = self._expected - self._loaded
        if missing:
            raise PolicyError(f"the policy lacks {len(missing)} parameters: {first_three(missing)}")
        if partial := set(incomplete_experts(self.model)):
            raise PolicyError(f"the policy lacks experts of {len(partial)} layers: {first_three(partial)}")
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            self._repack_tied_heads()
        if self._drafting and self.draft_layers is not None:
            self._reload_draft_layers(self.draft_layers)

    def shutdown(self) -> None:
        """Do nothing. Subclasses release here what outlives an update."""

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load pairs of Hugging Face name and tensor, in any order."""
        # The matrices of all the worker's experts may come as one stack (see `HeldExperts.loadable`).
        # A model that was built from an FP8 checkpoint loads FP8 weights unconverted.
        if not isinstance(self.vllm_config.quant_config, Fp8Config):
            tensors = dequantised(tensors, self.model_config.dtype)
        self._loaded |= self.model.load_weights(self._without_draft_layers(tensors))

    def draft_names(self) -> re.Pattern[str]:
        """Return a pattern that matches the tensor names of draft layers (MTP)."""
        config = self.model_config.hf_text_config
        return layers_ahead(config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0)

    def _without_draft_layers(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's tensors. Collect those of draft layers, and load them once the model is complete."""
        names = self.draft_names() if self.draft_layers is not None else None
        for name, tensor in tensors:
            if names is None or not names.fullmatch(name):
                yield name, tensor
            elif not name.endswith(_SHARED):
                self._drafting.append((name, tensor))

    def _reload_draft_layers(self, drafter: Any) -> None:
        # The embedding and the head belong to the policy as well, and have just been loaded with it.
        shared = set(self.model.modules())
        draft_modules = {name: module for name, module in drafter.named_modules() if module not in shared}
        optional = _aliases(drafter) | set(_attention_scales(drafter))
        for parameter in drafter.parameters():
            _name_loader(parameter)
        initialize_layerwise_reload(_Modules(draft_modules.values()))
        names = {
            f"{name}.{key}" for name, each in draft_modules.items() for key, _ in each.named_parameters(recurse=False)
        }
        missing = names - optional - drafter.load_weights(self._drafting)
        missing |= set(incomplete_experts(drafter))
        if missing:
            raise PolicyError(f"the policy lacks {len(missing)} parameters of draft layers: {first_three(missing)}")
        finalize_layerwise_reload(_Modules(draft_modules.values()), self.model_config)
        self._drafting = []

    def has_tied_embeddings(self) -> bool:
        """Return whether the output head shares its weights with the embedding."""
        # For a multimodal model the top-level config takes precedence over the text model's.
        whole, text = self.model_config.hf_config, self.model_config.hf_text_config
        return bool(getattr(whole, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False)))

    def _roll_back_partial_layers(self) -> None:
        # After a failed update some layers are partly filled. vLLM would count the retry's tensors on top of the old
        # ones, and consider a layer complete too early. Finalizing a layer with no loaded elements restores its
        # previous tensors.
        models = [self.model, *filter(None, [self.draft_layers])]
        layers = dict.fromkeys(layer for model in models for layer in model.modules())
        partial = {layer: info for layer in layers if (info := get_layerwise_info(layer)).can_load()}
        for info in partial.values():
            info.load_numel = 0
            info.loaded_weights.clear()
        if partial:
            finalize_layerwise_reload(_Modules(partial), self.model_config)

    def _repack_tied_heads(self) -> None:
        # On CPU a head that is tied to the embedding computes with its own packed copy, which the reload skips.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def _tied_parameters(self) -> set[str]:
        if not self.has_tied_embeddings():
            return set()
        heads = [name for name, module in self.model.named_modules() if isinstance(module, ParallelLMHead)]
        return {f"{head}.weight" for head in heads}


class _Modules(torch.nn.Module):
    """Wraps a few modules as a model, for vLLM's functions that reload every module of a model."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self._chosen = tuple(modules)

    def modules(self, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
        return iter(self._chosen)


def give_draft_layers() -> None:
    """Patch vLLM to give transfer engines the draft layers of engines with method mtp."""
    from vllm.v1.worker.gpu_worker import Worker

    start = expect(Worker, "start_weight_update", ("self",))
    expect(Worker, "get_draft_model", ("self",))

    @functools.wraps(start)
    def start_weight_update(self: Any) -> None:
        if self.speculative_config is not None and self.speculative_config.method == "mtp":
            self.weight_transfer_engine.draft_layers = self.get_draft_model()
        start(self)

    Worker.start_weight_update = start_weight_update


def _aliases(model: torch.nn.Module) -> set[str]:
    """Return the names of parameters that have another name as well, except the first one of each."""
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return every_name - {name for name, _ in model.named_parameters()}


def _attention_scales(model: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the KV-cache scales of quantised attention. A policy without them leaves them unchanged."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            yield from (f"{name}.{scale}" for scale, _ in module.named_parameters(recurse=False))


def first_three(names: set[str]) -> str:
    """Return the first few names, for an error message."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (" ..." if len(names) > len(shown) else "")


def dequantised(tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert block-scaled FP8 weights to `dtype`, and pass on all other tensors.

    Raise PolicyError if a weight came without its scales, or scales without their weight.
    """
    alone: dict[str, torch.Tensor] = {}  # weights and scales whose counterpart has not arrived yet
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
        raise PolicyError(f"FP8 weights and their scales do not match: {first_three(set(alone))}")


def _unscaled(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply an FP8 matrix [rows, columns], or a stack of matrices, by its block scales. Returns `dtype`."""
    rows, columns = weight.shape[-2:]
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    at_once = max(1, _ELEMENTS_AT_ONCE // (rows * columns))
    stacks = (tensor.view(-1, *tensor.shape[-2:]).split(at_once) for tensor in (result, weight, scales))
    for target, data, scale in zip(*stacks, strict=True):
        wide = scale.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
        target.copy_(data.float() * wide[..., :rows, :columns])
    return result


SELECTION_BIAS = "e_score_correction_bias"


# vLLM's reload puts the parameters on the meta device, and replays the calls of their loaders later. It needs a named
# loader per parameter, and loses what a model's `load_weights` copies without a loader. The functions below work around
# this for some families. Review them whenever the pinned vLLM version changes (tests/engine/test_reloads.py).
def _begin_reload(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        _name_loader(parameter)
    gpt_oss = [module for module in model.modules() if isinstance(module, GptOssModel)]
    experts = [layer for each in gpt_oss for layer in each.modules() if isinstance(layer, RoutedExperts)]
    for layer in experts:
        _copy_whole(layer)
    sinks_of = [(layer, layer.sinks) for each in gpt_oss for layer in each.modules() if isinstance(layer, OAIAttention)]
    initialize_layerwise_reload(model)
    for layer in experts:
        _load_copies(layer)
    for layer, sinks in sinks_of:
        # `load_weights` copies into the sinks directly, and vLLM derives nothing from them, so load them in place.
        layer.register_parameter("sinks", sinks)
        get_layerwise_info(layer).reset()


def load_selection_bias() -> None:
    """Patch vLLM to load the selection bias of experts that have it under their own name, as in Laguna."""
    # Without the patch vLLM drops the bias, even when an engine starts, and selects experts without it.
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
    # The reload reads every loader's `__name__`, which the `partial` of MiniMax's query and key norms lacks.
    loader = getattr(parameter, "weight_loader", None)
    if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
        loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def _copy_whole(layer: RoutedExperts) -> None:
    """Make the reload copy expert tensors whole, because GPT-OSS slices them for the worker beforehand."""
    parameters, _ = get_layerwise_info(layer).restore_metadata
    for parameter in parameters.values():
        parameter.weight_loader = default_weight_loader


def _load_copies(layer: RoutedExperts) -> None:
    """Route GPT-OSS's direct copies into expert parameters through the loader; the meta device drops them."""
    for parameter in layer.parameters(recurse=False):
        parameter.copy_ = functools.partial(_load_once, parameter)


def _load_once(parameter: Any, tensor: torch.Tensor) -> None:
    del parameter.copy_  # the real parameter inherits these attributes, and needs torch's own `copy_`
    parameter.weight_loader(parameter, tensor)

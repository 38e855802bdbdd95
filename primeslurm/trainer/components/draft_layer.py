"""The draft layer (MTP) of a checkpoint as a model of its own: the family's decoder with one layer and another input.

Formula: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2, as vLLM 0.32 computes it
(deepseek_mtp.py, glm4_moe_mtp.py, qwen3_5_mtp.py). The input joins the embedding of the next token with the token's
hidden state after the model's last norm. The output is normalized for the model's own head, which predicts the token
after the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchtitan.models.common import Linear
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from primeslurm.models import model_builder
from primeslurm.models.hf_config import DRAFT_LAYERS
from primeslurm.nn.checkpoint_names import DraftFormat, adapter_for_checkpoint
from primeslurm.nn.layers.common import build_parts, linear
from primeslurm.trainer.base.model_draft import ModelDraft

Tensors = dict[str, torch.Tensor]

# DeepSeek's format, which GLM has too
_LAYER = "model.layers.{}."
_FORMAT = DraftFormat(
    decoder_layer=_LAYER,
    layer=_LAYER,
    outside={
        "tok_embeddings.enorm.weight": _LAYER + "enorm.weight",
        "tok_embeddings.hnorm.weight": _LAYER + "hnorm.weight",
        "tok_embeddings.eh_proj.weight": _LAYER + "eh_proj.weight",
        "norm.weight": _LAYER + "shared_head.norm.weight",
    },
    copies={
        "model.embed_tokens.weight": _LAYER + "embed_tokens.weight",
        "lm_head.weight": _LAYER + "shared_head.head.weight",
    },
)


class JoinedInput(Module):
    """Projects a draft layer's joined input to the model dimension, in the place of a decoder's embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        enorm: Module.Config
        hnorm: Module.Config
        eh_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        build_parts(self, config, "enorm", "hnorm", "eh_proj")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Project [rows, length, 2 * dim], embeddings of next tokens beside hidden states, to [rows, length, dim]."""
        embeddings, hidden = inputs.chunk(2, dim=-1)
        return self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))


class NoHead(Module):
    """A head that returns hidden states as they are, because the policy's head computes the logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class DraftLayerAdapter:
    """Maps tensors of draft layer `number` to checkpoint names, by the state dict adapter `decoder` of its family."""

    def __init__(self, decoder: Any, number: int) -> None:
        self.format = _format_of(decoder)
        self._decoder, self._number = decoder, number
        self._outside = {ours: hf.format(number) for ours, hf in self.format.outside.items()}
        self._prefixes = self.format.decoder_layer.format(number), self.format.layer.format(number)

    def to_hf(self, state_dict: Tensors) -> Tensors:
        outside, layer = _split(state_dict, self._outside)
        return outside | _with_prefix(self._decoder.to_hf(layer), *self._prefixes)

    def from_hf(self, hf_state_dict: Tensors) -> Tensors:
        outside, layer = _split(hf_state_dict, {hf: ours for ours, hf in self._outside.items()})
        loaded: Tensors = self._decoder.from_hf(_with_prefix(layer, *reversed(self._prefixes)))
        return outside | loaded

    def for_checkpoint(self, names: Iterable[str]) -> DraftLayerAdapter:
        """Return the adapter for a checkpoint with these tensor names: this one, or another if it stacks experts."""
        decoder = adapter_for_checkpoint(self._decoder, names)
        return self if decoder is self._decoder else DraftLayerAdapter(decoder, self._number)

    def copies(self, stored_names: set[str]) -> dict[str, str]:
        """Map tensors of the model to the names under which a checkpoint repeats them in the draft layer."""
        names = {ours: hf.format(self._number) for ours, hf in self.format.copies.items()}
        return {ours: name for ours, name in names.items() if name in stored_names}


def _format_of(decoder: Any) -> DraftFormat:
    found: DraftFormat = getattr(decoder, "draft_format", _FORMAT)
    return found


def _split(tensors: Tensors, names: dict[str, str]) -> tuple[Tensors, Tensors]:
    """Return the tensors that `names` renames, and the others."""
    renamed = {names[name]: tensor for name, tensor in tensors.items() if name in names}
    return renamed, {name: tensor for name, tensor in tensors.items() if name not in names}


def _with_prefix(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new + name.removeprefix(old): tensor for name, tensor in tensors.items()}


def spec(config: Any, seq_len: int, attention: str) -> ModelSpec:
    """Return the spec of a decoder whose only layer is the draft layer of a transformers config.

    Raises ValueError if the config has not exactly one draft layer, or the layer's embedding or head is not supported.
    """
    if (count := number_of_layers(config)) != 1:
        raise ValueError(f"trainer.draft_layer: the model has {count} draft layers, and only one can be trained")
    longer = copy.deepcopy(config)
    text = longer.get_text_config()
    if getattr(text, "mtp_use_dedicated_embeddings", False):
        raise ValueError(
            "trainer.draft_layer: the model has mtp_use_dedicated_embeddings: true, but vLLM 0.32 uses the model's "
            "embedding. Remove draft_layer."
        )
    text.num_hidden_layers += 1
    if layer_types := getattr(text, "layer_types", None):
        text.layer_types = [*layer_types, "full_attention"]
    if indexer_types := getattr(text, "indexer_types", None):
        text.indexer_types = [*indexer_types, "full"]  # a draft layer selects its keys itself
    result = model_builder.spec(longer, seq_len, attention)
    if result.model.enable_weight_tying and _format_of(result.state_dict_adapter).copies:
        raise ValueError("trainer.draft_layer: the head is tied to the embedding")
    result.model.enable_weight_tying = False  # a draft layer has neither embedding nor head
    result.model.layers = result.model.layers[-1:]
    if hasattr(result.model, "vision"):
        result.model.vision = None  # the policy has the encoder
    return result


def number_of_layers(config: Any) -> int:
    text = config.get_text_config()
    return next((count for name in DRAFT_LAYERS if (count := getattr(text, name, None)) is not None), 0)


def convert(draft: ModelDraft) -> None:
    """Turn a built decoder with one layer into draft layer `draft.draft_layer`. None: leave the model as it is."""
    if draft.draft_layer is None:
        return
    model, config = draft.model, draft.config
    norm = replace(config.norm, sharding_config=None)
    with torch.device("meta"):
        joined = JoinedInput.Config(enorm=norm, hnorm=norm, eh_proj=linear(2 * config.dim, config.dim))
        model.tok_embeddings, model.lm_head = joined.build(), NoHead.Config().build()
    model.layers[str(draft.draft_layer)] = model.layers.pop("0")
    draft.adapter = DraftLayerAdapter(draft.adapter, draft.draft_layer)

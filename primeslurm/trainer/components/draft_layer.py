"""The draft layer (MTP) of a checkpoint as a model of its own: the family's decoder with one layer and another input.

Formula: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2, as vLLM 0.32 computes it
(deepseek_mtp.py, glm4_moe_mtp.py). The input joins the embedding of the next token with the token's hidden state after
the model's last norm. The output is normalized for the model's own head, which predicts the token after the next one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchtitan.models.common import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from primeslurm.models import model_builder
from primeslurm.nn.layers.common import build_parts, linear
from primeslurm.trainer.base.model_draft import ModelDraft

Tensors = dict[str, torch.Tensor]

# Parameters outside of the decoder layer, with their names in checkpoints
_NAMES = {
    "tok_embeddings.enorm.weight": "enorm.weight",
    "tok_embeddings.hnorm.weight": "hnorm.weight",
    "tok_embeddings.eh_proj.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
# Tensors of the model that checkpoints repeat in the draft layer
_COPIES = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"}


class JoinedInput(Module):
    """The input of a draft layer, in the place of a decoder's embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        enorm: RMSNorm.Config
        hnorm: RMSNorm.Config
        eh_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        build_parts(self, config, "enorm", "hnorm", "eh_proj")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Join embeddings of next tokens and hidden states [rows, length, 2 * dim]."""
        embeddings, hidden = inputs.chunk(2, dim=-1)
        return self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))


class NoHead(Module):
    """The head of a decoder that returns its normalized hidden states."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class DraftLayerAdapter:
    """Names the tensors of draft layer `number` as checkpoints do. `decoder` is the adapter of the family's decoder."""

    def __init__(self, decoder: Any, number: int) -> None:
        self._decoder = decoder
        self._hf_names = {ours: f"model.layers.{number}.{hf}" for ours, hf in _NAMES.items()}

    def to_hf(self, state_dict: Tensors) -> Tensors:
        return _renamed(state_dict, self._hf_names, self._decoder.to_hf)

    def from_hf(self, hf_state_dict: Tensors) -> Tensors:
        return _renamed(hf_state_dict, {hf: ours for ours, hf in self._hf_names.items()}, self._decoder.from_hf)


def _renamed(tensors: Tensors, names: dict[str, str], rest: Any) -> Tensors:
    return {names[name]: tensor for name, tensor in tensors.items() if name in names} | rest(
        {name: tensor for name, tensor in tensors.items() if name not in names}
    )


def spec(config: Any, seq_len: int, attention: str) -> ModelSpec:
    """Return the spec of a decoder whose only layer is the draft layer of a transformers config.

    Raises ValueError if the config has not exactly one draft layer, or the head is tied to the embedding.
    """
    if (count := number_of_layers(config)) != 1:
        raise ValueError(f"trainer.draft_layer: the model has {count} draft layers, and only one can be trained")
    longer = copy.deepcopy(config)
    longer.num_hidden_layers += 1
    if indexer_types := getattr(longer, "indexer_types", None):
        longer.indexer_types = [*indexer_types, "full"]  # a draft layer selects its keys itself
    result = model_builder.spec(longer, seq_len, attention)
    if result.model.enable_weight_tying:
        raise ValueError("trainer.draft_layer: the head is tied to the embedding")
    result.model.layers = result.model.layers[-1:]
    return result


def number_of_layers(config: Any) -> int:
    return getattr(config.get_text_config(), "num_nextn_predict_layers", None) or 0


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


def copies(number: int, stored_names: set[str]) -> dict[str, str]:
    """Map tensors of the model to the names under which a checkpoint repeats them in draft layer `number`."""
    names = {ours: f"model.layers.{number}.{name}" for ours, name in _COPIES.items()}
    return {ours: name for ours, name in names.items() if name in stored_names}

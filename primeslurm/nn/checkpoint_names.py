"""Adapters between parameter names of our models and of Hugging Face checkpoints: a table of names per family."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.utils import MoEStateDictAdapter

Tensors = dict[str, torch.Tensor]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = "model.layers.{}."
_ATTENTION = {"q_proj": "qkv_linear.wq", "k_proj": "qkv_linear.wk", "v_proj": "qkv_linear.wv", "o_proj": "wo"}
_FFN = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_VISION, _HF_VISION = "vision.encoder.", "model.visual."
ROUTED_EXPERTS = "layers.{}.moe.routed_experts.inner_experts."
GATE_UP, DOWN = "gate_up_proj", "down_proj"

# Names of a dense decoder
DECODER: dict[str, str] = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    _LAYER + "input_layernorm.weight": "layers.{}.attention_norm.weight",
    _LAYER + "post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    _LAYER + "self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
    _LAYER + "self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
    **{
        f"{_LAYER}self_attn.{hf}.{kind}": f"layers.{{}}.attention.{ours}.{kind}"
        for hf, ours in _ATTENTION.items()
        for kind in ("weight", "bias")
    },
    **{f"{_LAYER}mlp.{hf}.weight": f"layers.{{}}.feed_forward.{ours}.weight" for hf, ours in _FFN.items()},
}

# Names of mixtures of experts
MOE: dict[str, str] = {
    _LAYER + "mlp.gate.weight": "layers.{}.moe.router.gate.weight",
    _LAYER + "mlp.gate.e_score_correction_bias": "layers.{}.moe.expert_bias_E",
    _LAYER + "mlp.experts.{}.gate_proj.weight": ROUTED_EXPERTS + "w1_EFD",
    _LAYER + "mlp.experts.{}.up_proj.weight": ROUTED_EXPERTS + "w3_EFD",
    _LAYER + "mlp.experts.{}.down_proj.weight": ROUTED_EXPERTS + "w2_EDF",
    **{
        f"{_LAYER}mlp.shared_experts.{hf}.weight": f"layers.{{}}.moe.shared_experts.{ours}.weight"
        for hf, ours in _FFN.items()
    },
}


@dataclass(frozen=True)
class DraftFormat:
    """Names of a draft layer (MTP) in checkpoints, and where its formula differs between families.

    In names, `{}` is the number of the draft layer, counted from the model's first layer.
    """

    decoder_layer: str
    """Prefix that the adapter of the family's decoder gives to this layer."""
    layer: str
    """Prefix of the decoder layer in checkpoints."""
    outside: Mapping[str, str]
    """Names of the tensors outside the decoder layer: ours to those in checkpoints."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Model tensors that the checkpoint's draft layer repeats: our name to the name of the copy."""
    sees_first_embedding: bool = False
    """The layer sees an embedding at the first position of a sequence. DeepSeek's sees zeros."""


class TableAdapter(MoEStateDictAdapter):
    """Renames tensors by a table. If a checkpoint holds experts one by one, it also splits and stacks them.

    `to_hf` and `from_hf` raise KeyError for a name that is not in the table. A rank converts the experts that it holds,
    without communication.
    """

    names: ClassVar[dict[str, str]] = {}
    """Checkpoint name to our name. `{}` is the layer; a second `{}` in a checkpoint's name is the expert."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self._hf_names = {ours: hf for hf, ours in self.names.items()}

    def to_hf(self, state_dict: Tensors) -> Tensors:
        converted: Tensors = {}
        for name, tensor in state_dict.items():
            pattern, numbers = _parse(name)
            hf = self._hf_names[pattern]
            if hf.count("{}") == 2:
                converted |= self._split(hf, pattern, numbers[0], tensor)
            # Checkpoints with tied weights have no head.
            elif not (self.model_config.enable_weight_tying and name == "lm_head.weight"):
                converted[hf.format(*numbers)] = tensor
        return converted

    def from_hf(self, hf_state_dict: Tensors) -> Tensors:
        converted: Tensors = {}
        experts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
        for name, tensor in hf_state_dict.items():
            pattern, numbers = _parse(name)
            ours = self.names[pattern]
            if len(numbers) == 2:
                experts.setdefault((ours, numbers[0]), {})[int(numbers[1])] = tensor
            else:
                converted[ours.format(*numbers)] = tensor
        for (ours, layer), tensors in experts.items():
            converted[ours.format(layer)] = self._stack(ours, [tensors[index] for index in sorted(tensors)])
        if self.model_config.enable_weight_tying:
            converted["lm_head.weight"] = converted["tok_embeddings.weight"]
        return converted

    def _split(self, hf: str, ours: str, layer: str, tensor: torch.Tensor) -> Tensors:
        if not isinstance(tensor, DTensor):
            return {hf.format(layer, index): expert for index, expert in enumerate(tensor)}
        # `from_hf` gets the experts of this rank, and has to restore the layout of the stack.
        self.grouped_expert_weight_placements[ours] = tensor.placements
        self.grouped_expert_weight_mesh[ours] = tensor.device_mesh
        return self._get_local_experts_weights(hf, ours, layer, tensor)

    def _stack(self, ours: str, experts: list[torch.Tensor]) -> torch.Tensor:
        stack = torch.stack(experts)
        if ours not in self.grouped_expert_weight_mesh:
            return stack
        local = stack.to_local() if isinstance(stack, DTensor) else stack
        mesh, placements = self.grouped_expert_weight_mesh[ours], self.grouped_expert_weight_placements[ours]
        return DTensor.from_local(local, mesh, placements, run_check=False)


class DecoderAdapter(TableAdapter):
    """Adapter for dense decoders whose checkpoints use the most common Hugging Face names."""

    names = DECODER | MOE


class VisionAdapter(TableAdapter):
    """Renames the decoder's tensors by a table. The vision encoder's keep transformers' names behind a prefix."""

    def to_hf(self, state_dict: Tensors) -> Tensors:
        vision, decoder = _split_by_prefix(state_dict, _VISION)
        return super().to_hf(decoder) | {_HF_VISION + name: tensor for name, tensor in vision.items()}

    def from_hf(self, hf_state_dict: Tensors) -> Tensors:
        vision, decoder = _split_by_prefix(hf_state_dict, _HF_VISION)
        return super().from_hf(decoder) | {_VISION + name: tensor for name, tensor in vision.items()}


class StackedAdapter(VisionAdapter):
    """Adapter for checkpoints with two expert stacks per layer [experts, out, in]: gate joined with up, and down."""

    experts: ClassVar[str]
    """Name of the module that holds a layer's experts. `{}` is the layer."""
    transposed: ClassVar[bool] = False
    """True if checkpoints store stacks as [experts, in, out]."""

    def to_hf(self, state_dict: Tensors) -> Tensors:
        stacks = {name: tensor for name, tensor in state_dict.items() if ".inner_experts." in name}
        converted = super().to_hf({name: tensor for name, tensor in state_dict.items() if name not in stacks})
        for name, tensor in stacks.items():
            prefix, kind = name.rsplit(".", 1)
            hf = self.experts.format(prefix.split(".")[1])
            if kind == "w1_EFD":
                up = stacks[f"{prefix}.w3_EFD"]
                converted[f"{hf}.{GATE_UP}"] = _locally(lambda g, u: self._oriented(torch.cat([g, u], 1)), tensor, up)
            elif kind == "w2_EDF":
                converted[f"{hf}.{DOWN}"] = _locally(self._oriented, tensor)
        return converted

    def from_hf(self, hf_state_dict: Tensors) -> Tensors:
        stacks = {name: tensor for name, tensor in hf_state_dict.items() if ".mlp.experts." in name}
        converted = super().from_hf({name: tensor for name, tensor in hf_state_dict.items() if name not in stacks})
        for name, tensor in stacks.items():
            ours = ROUTED_EXPERTS.format(name.removeprefix(self.experts.partition("{}")[0]).split(".")[0])
            if name.endswith(DOWN):
                converted[ours + "w2_EDF"] = _locally(self._oriented, tensor)
            else:
                converted[ours + "w1_EFD"] = _locally(lambda both: self._oriented(both).chunk(2, 1)[0], tensor)
                converted[ours + "w3_EFD"] = _locally(lambda both: self._oriented(both).chunk(2, 1)[1], tensor)
        return converted

    def _oriented(self, stack: torch.Tensor) -> torch.Tensor:
        return stack.mT if self.transposed else stack


def stacked_adapter(adapter: Any) -> type[StackedAdapter] | None:
    """Return the StackedAdapter class of an adapter's family, or None if its checkpoints never stack experts."""
    return type(adapter) if isinstance(adapter, StackedAdapter) else getattr(adapter, "stacked", None)


def adapter_for_checkpoint(adapter: Any, names: Iterable[str]) -> Any:
    """Return the adapter for a checkpoint with these tensor names: `adapter`, or its family's StackedAdapter."""
    if hasattr(adapter, "for_checkpoint"):
        return adapter.for_checkpoint(names)
    stacked = stacked_adapter(adapter)
    if stacked is None or isinstance(adapter, stacked) or not any(name.endswith(f".{GATE_UP}") for name in names):
        return adapter
    return stacked(adapter.model_config, None)


def _locally(change: Callable[..., torch.Tensor], *stacks: Any) -> Any:
    """Apply a function that keeps the first dimension to each rank's part of stacks that are split by it."""
    if not isinstance(stacks[0], DTensor):
        return change(*stacks)
    mesh, placements = stacks[0].device_mesh, stacks[0].placements
    # If ranks cannot share the experts evenly, another dimension is split too: gather it first.
    if any(placement.is_shard() and not placement.is_shard(0) for placement in placements):
        placements = tuple(place if place.is_shard(0) else Replicate() for place in placements)
        stacks = tuple(stack.redistribute(placements=placements) for stack in stacks)
    local = change(*(stack.to_local() for stack in stacks)).contiguous()
    shape = torch.Size([len(stacks[0]), *local.shape[1:]])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=local.stride())


def renamed(names: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return a table in which each checkpoint name has the keys of `changes`, in order, replaced by their values."""
    result = dict(names)
    for old, new in changes.items():
        result = {hf.replace(old, new): ours for hf, ours in result.items()}
    return result


def _parse(name: str) -> tuple[str, list[str]]:
    return _NUMBER.sub("{}", name), _NUMBER.findall(name)


def _split_by_prefix(tensors: Tensors, prefix: str) -> tuple[Tensors, Tensors]:
    inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return inside, {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}

"""Between our parameter names and those of a Hugging Face checkpoint, by a table per family.

`DECODER` and `MOE` hold the names that most checkpoints agree on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.utils import MoEStateDictAdapter

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = "model.layers.{}."
_ATTENTION = {"q_proj": "qkv_linear.wq", "k_proj": "qkv_linear.wk", "v_proj": "qkv_linear.wv", "o_proj": "wo"}
_FFN = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
ROUTED_EXPERTS = "layers.{}.moe.routed_experts.inner_experts."

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
"""A dense decoder."""

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
"""Its mixtures of experts."""


class TableAdapter(MoEStateDictAdapter):
    """Renames tensors; where checkpoints hold experts one by one, it splits and stacks them.

    A rank converts the experts that it owns, without communication.
    """

    names: ClassVar[dict[str, str]] = {}
    """Checkpoint name to ours. `{}` is the layer; a second `{}` in a checkpoint's name is the expert."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self._hf_names = {ours: hf for hf, ours in self.names.items()}

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return our tensors under checkpoint names. Raises KeyError for one that the table does not have."""
        converted: dict[str, torch.Tensor] = {}
        for name, tensor in state_dict.items():
            pattern, numbers = _parse(name)
            hf = self._hf_names[pattern]
            if hf.count("{}") == 2:
                converted |= self._split(hf, pattern, numbers[0], tensor)
            elif not (self.model_config.enable_weight_tying and name == "lm_head.weight"):
                converted[hf.format(*numbers)] = tensor
        return converted

    def from_hf(self, hf_state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what `to_hf` made, or a whole checkpoint, under our names. Raises KeyError for an unknown name."""
        converted: dict[str, torch.Tensor] = {}
        experts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
        for name, tensor in hf_state_dict.items():
            pattern, numbers = _parse(name)
            ours = self.names[pattern]
            if len(numbers) == 2:
                experts.setdefault((ours, numbers[0]), {})[int(numbers[1])] = tensor
            else:
                converted[ours.format(*numbers)] = tensor
        for (ours, layer), parts in experts.items():
            converted[ours.format(layer)] = self._stack(ours, [parts[index] for index in sorted(parts)])
        if self.model_config.enable_weight_tying:
            converted["lm_head.weight"] = converted["tok_embeddings.weight"]
        return converted

    def _split(self, hf: str, ours: str, layer: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not isinstance(tensor, DTensor):
            return {hf.format(layer, index): expert for index, expert in enumerate(tensor)}
        self.grouped_expert_weight_placements[ours] = tensor.placements
        self.grouped_expert_weight_mesh[ours] = tensor.device_mesh
        return self._get_local_experts_weights(hf, ours, layer, tensor)

    def _stack(self, ours: str, parts: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.stack(parts)
        if ours not in self.grouped_expert_weight_mesh:
            return whole
        local = whole.to_local() if isinstance(whole, DTensor) else whole
        mesh, placements = self.grouped_expert_weight_mesh[ours], self.grouped_expert_weight_placements[ours]
        return DTensor.from_local(local, mesh, placements, run_check=False)


def renamed(names: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """`names`, with the keys of `changes` replaced by their values, in order, in every Hugging Face name."""
    result = dict(names)
    for old, new in changes.items():
        result = {hf.replace(old, new): ours for hf, ours in result.items()}
    return result


def _parse(name: str) -> tuple[str, list[str]]:
    return _NUMBER.sub("{}", name), _NUMBER.findall(name)

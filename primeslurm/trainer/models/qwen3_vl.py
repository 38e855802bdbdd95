"""Qwen3-VL and Qwen3-VL-MoE: Qwen3 with a vision encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from primeslurm.trainer import compat  # noqa: F401  isort: skip  (before torchtitan)
import torch
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.trainer.models import qwen3, vision
from primeslurm.trainer.models.names import DECODER, MOE, renamed

_BELOW = {"model.": "model.language_model."}
_OURS = "layers.{}.moe.routed_experts.inner_experts."


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """The torchtitan spec of a Qwen3-VL config. Raises ValueError for features that are not implemented."""
    text = hf.text_config
    text.tie_word_embeddings = hf.tie_word_embeddings
    made = qwen3.spec(text, seq_len, attention)
    made.model.vision = vision.VisionEncoder.Config(hf=hf.vision_config)
    moe = any(layer.moe is not None for layer in made.model.layers)
    return replace(made, flavor=hf.model_type, state_dict_adapter=MoeAdapter if moe else Adapter)


class Adapter(vision.SeeingAdapter):
    """Names of Qwen3-VL checkpoints."""

    names = renamed(DECODER, _BELOW)


class MoeAdapter(vision.SeeingAdapter):
    """Names of Qwen3-VL-MoE checkpoints, which stack a layer's experts: [experts, in, out], gate beside up."""

    names = renamed(DECODER | {hf: ours for hf, ours in MOE.items() if ".experts." not in hf}, _BELOW)
    stacked_experts = "model.language_model.layers.{}.mlp.experts"
    """Module that holds the experts of a layer; `{}` is the layer."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our tensors under checkpoint names. Raises KeyError for one that the table does not have."""
        experts = {name: tensor for name, tensor in state_dict.items() if ".inner_experts." in name}
        converted = super().to_hf({name: t for name, t in state_dict.items() if name not in experts})
        for name, gate in experts.items():
            prefix, kind = name.rsplit(".", 1)
            theirs = self.stacked_experts.format(prefix.split(".")[1])
            if kind == "w1_EFD":
                up = experts[f"{prefix}.w3_EFD"]
                converted[f"{theirs}.gate_up_proj"] = _locally(lambda g, u: torch.cat([g, u], 1).mT, gate, up)
            elif kind == "w2_EDF":
                converted[f"{theirs}.down_proj"] = _locally(lambda down: down.mT, gate)
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """What `to_hf` made, or a whole checkpoint, under our names. Raises KeyError for an unknown name."""
        experts = {name: tensor for name, tensor in hf_state_dict.items() if ".mlp.experts." in name}
        converted = super().from_hf({name: t for name, t in hf_state_dict.items() if name not in experts})
        for name, tensor in experts.items():
            ours = _OURS.format(name.removeprefix("model.language_model.layers.").split(".")[0])
            if name.endswith(".down_proj"):
                converted[ours + "w2_EDF"] = _locally(lambda down: down.mT, tensor)
            else:
                converted[ours + "w1_EFD"] = _locally(lambda both: both.mT.chunk(2, 1)[0], tensor)
                converted[ours + "w3_EFD"] = _locally(lambda both: both.mT.chunk(2, 1)[1], tensor)
        return converted


def _locally(change: Callable[..., torch.Tensor], *stacks: Any) -> Any:
    """`change`, which leaves the first dimension alone, of each rank's part of stacks that are split by it.

    With more ranks than experts these are split by another dimension, and are gathered first.
    """
    if not isinstance(stacks[0], DTensor):
        return change(*stacks)
    mesh, placements = stacks[0].device_mesh, stacks[0].placements
    if any(placement.is_shard() and placement.dim != 0 for placement in placements):
        placements = (Replicate(),) * mesh.ndim
        stacks = tuple(stack.redistribute(placements=placements) for stack in stacks)
    local = change(*(stack.to_local() for stack in stacks)).contiguous()
    shape = torch.Size([len(stacks[0]), *local.shape[1:]])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=local.stride())

"""Between our parameter names and those of a Hugging Face checkpoint, by a table per family."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.utils import MoEStateDictAdapter

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class TableAdapter(MoEStateDictAdapter):
    """Renames tensors; where checkpoints hold experts one by one, it splits and stacks them.

    A rank converts the experts that it owns, without communication.
    """

    names: ClassVar[dict[str, str]] = {}
    """Checkpoint name to ours. `{}` is the layer; a second `{}` in a checkpoint's name is the expert."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self._hf_names = {ours: hf for hf, ours in self.names.items()}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our tensors under checkpoint names. Raises KeyError for one that the table does not have."""
        converted: dict[str, Any] = {}
        for name, tensor in state_dict.items():
            pattern, numbers = _parse(name)
            hf = self._hf_names[pattern]
            if hf.count("{}") == 2:
                converted |= self._split(hf, pattern, numbers[0], tensor)
            elif not (self.model_config.enable_weight_tying and name == "lm_head.weight"):
                converted[hf.format(*numbers)] = tensor
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """What `to_hf` made, or a whole checkpoint, under our names. Raises KeyError for an unknown name."""
        converted: dict[str, Any] = {}
        experts: dict[tuple[str, str], dict[int, Any]] = {}
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

    def _split(self, hf: str, ours: str, layer: str, tensor: Any) -> dict[str, Any]:
        if not isinstance(tensor, DTensor):
            return {hf.format(layer, index): expert for index, expert in enumerate(tensor)}
        self.grouped_expert_weight_placements[ours] = tensor.placements
        self.grouped_expert_weight_mesh[ours] = tensor.device_mesh
        return self._get_local_experts_weights(hf, ours, layer, tensor)

    def _stack(self, ours: str, parts: list[Any]) -> Any:
        whole = torch.stack(parts)
        if ours not in self.grouped_expert_weight_mesh:
            return whole
        local = whole.to_local() if isinstance(whole, DTensor) else whole
        mesh, placements = self.grouped_expert_weight_mesh[ours], self.grouped_expert_weight_placements[ours]
        return DTensor.from_local(local, mesh, placements, run_check=False)


def _parse(name: str) -> tuple[str, list[str]]:
    return _NUMBER.sub("{}", name), _NUMBER.findall(name)

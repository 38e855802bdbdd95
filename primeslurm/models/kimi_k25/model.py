"""The text model of Kimi-K2.5 to K2.7, which is DeepSeek-V3's. What sees images is published as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.models.kimi_k2 import model

PREFIX = "language_model."


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """Make the torchtitan spec of the config's text model. Raises ValueError for features that are not implemented."""
    text = model.spec(hf.text_config, seq_len, attention)
    return replace(text, flavor=hf.model_type, state_dict_adapter=KimiStateDictAdapter)


class KimiStateDictAdapter(DeepSeekV3StateDictAdapter):
    """DeepSeek-V3's names below `language_model`."""

    unchanged = ("vision_tower.", "mm_projector.")
    """How names of tensors begin that are not the text model's."""

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors under their Hugging Face names."""
        return {PREFIX + name: tensor for name, tensor in super().to_hf(state_dict).items()}

    def from_hf(self, hf_state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors under the model's names."""
        return dict(super().from_hf({name.removeprefix(PREFIX): t for name, t in hf_state_dict.items()}))

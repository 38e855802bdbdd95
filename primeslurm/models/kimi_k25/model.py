"""The text model of Kimi-K2.5 to K2.7, which is Kimi-K2. The vision encoder is published unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.models.kimi_k2 import model as kimi_k2
from primeslurm.nn.checkpoint_names import Tensors

PREFIX = "language_model."


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    text = kimi_k2.spec(hf.text_config, seq_len, attention)
    return replace(text, flavor=hf.model_type, state_dict_adapter=KimiStateDictAdapter)


class KimiStateDictAdapter(DeepSeekV3StateDictAdapter):
    """State dict adapter: DeepSeek-V3's checkpoint names, behind the prefix of the text model."""

    unchanged = ("vision_tower.", "mm_projector.")
    """Prefixes of checkpoint tensors outside the text model, which are published as they are."""

    def to_hf(self, state_dict: Tensors) -> Tensors:
        return {PREFIX + name: tensor for name, tensor in super().to_hf(state_dict).items()}

    def from_hf(self, hf_state_dict: Tensors) -> Tensors:
        return dict(super().from_hf({name.removeprefix(PREFIX): t for name, t in hf_state_dict.items()}))

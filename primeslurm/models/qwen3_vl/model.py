"""Qwen3-VL and Qwen3-VL-MoE: Qwen3 with a vision encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.models.qwen3 import model
from primeslurm.nn.adapters.stacked import StackedAdapter
from primeslurm.nn.adapters.table import DECODER, MOE, renamed
from primeslurm.nn.layers import vision

_BELOW = {"model.": "model.language_model."}


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """Make the torchtitan spec of a Qwen3-VL config. Raises ValueError for features that are not implemented."""
    text = hf.text_config
    text.tie_word_embeddings = hf.tie_word_embeddings
    made = model.spec(text, seq_len, attention)
    made.model.vision = vision.VisionEncoder.Config(hf=hf.vision_config)
    moe = any(layer.moe is not None for layer in made.model.layers)
    return replace(made, flavor=hf.model_type, state_dict_adapter=MoeAdapter if moe else Qwen3VLAdapter)


class Qwen3VLAdapter(vision.VisionAdapter):
    """Names of Qwen3-VL checkpoints."""

    names = renamed(DECODER, _BELOW)


class MoeAdapter(StackedAdapter):
    """Names of Qwen3-VL-MoE checkpoints."""

    names = renamed(DECODER | {hf: ours for hf, ours in MOE.items() if ".experts." not in hf}, _BELOW)
    experts = "model.language_model.layers.{}.mlp.experts"
    transposed = True

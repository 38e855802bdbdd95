"""torchtitan model of Qwen3-VL and Qwen3-VL-MoE: Qwen3 with a vision encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.models.qwen3 import model as qwen3
from primeslurm.nn.checkpoint_names import DECODER, MOE, StackedAdapter, VisionAdapter, renamed
from primeslurm.nn.layers import vision

_PREFIX = {"model.": "model.language_model."}


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    text = hf.text_config
    text.tie_word_embeddings = hf.tie_word_embeddings
    decoder = qwen3.spec(text, seq_len, attention)
    decoder.model.vision = vision.VisionEncoder.Config(hf=hf.vision_config)
    moe = any(layer.moe is not None for layer in decoder.model.layers)
    return replace(decoder, flavor=hf.model_type, state_dict_adapter=MoeAdapter if moe else Qwen3VLAdapter)


class Qwen3VLAdapter(VisionAdapter):
    """State dict adapter between this model and Qwen3-VL checkpoints."""

    names = renamed(DECODER, _PREFIX)


class MoeAdapter(StackedAdapter):
    """State dict adapter between this model and Qwen3-VL-MoE checkpoints."""

    names = renamed(DECODER | {hf: ours for hf, ours in MOE.items() if ".experts." not in hf}, _PREFIX)
    experts = "model.language_model.layers.{}.mlp.experts"
    transposed = True

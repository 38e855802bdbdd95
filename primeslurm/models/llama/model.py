"""torchtitan model of Llama 2 and 3, and models with their architecture."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.checkpoint_names import DecoderAdapter
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import ffn, refuse, refuse_other_activations
from primeslurm.nn.layers.rotary import rotary


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    refuse(hf, mlp_bias=hf.mlp_bias)
    refuse_other_activations(hf)
    bias = hf.attention_bias
    layers = [
        gqa.block(
            hf,
            gqa.attention(hf, attention, bias=bias, output_bias=bias, rope=rotary(hf)),
            feed_forward=ffn(hf, hf.intermediate_size),
        )
        for _ in range(hf.num_hidden_layers)
    ]
    return gqa.decoder_spec(hf, layers, DecoderAdapter)

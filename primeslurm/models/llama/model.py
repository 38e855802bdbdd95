"""Llama 2 and 3, and the models that share their architecture."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.adapters.table import DECODER, TableAdapter
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import ffn, norm, refuse, silu_only
from primeslurm.nn.layers.rotary import rotary


class LlamaAdapter(TableAdapter):
    """Names of Llama checkpoints."""

    names = DECODER


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """Make the torchtitan spec of a Llama config. Raises ValueError for features that are not implemented."""
    refuse(hf, mlp_bias=hf.mlp_bias, **silu_only(hf))
    layers = [_layer(hf, attention) for _ in range(hf.num_hidden_layers)]
    return gqa.model_spec(hf, layers, LlamaAdapter)


def _layer(hf: Any, attention: str) -> gqa.GqaBlock.Config:
    bias = hf.attention_bias
    return gqa.GqaBlock.Config(
        attention_norm=norm(hf, hf.hidden_size),
        attention=gqa.attention(hf, attention, bias=bias, output_bias=bias, rope=rotary(hf)),
        ffn_norm=norm(hf, hf.hidden_size),
        feed_forward=ffn(hf, hf.intermediate_size),
    )

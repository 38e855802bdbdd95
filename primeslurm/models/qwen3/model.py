"""torchtitan model of Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.checkpoint_names import DecoderAdapter
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import ffn, norm, refuse, refuse_other_activations
from primeslurm.nn.layers.moe import softmax_moe, swiglu_experts
from primeslurm.nn.layers.rotary import rotary


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    # getattr: the text configs of Qwen3-VL lack these two fields.
    refuse(hf, attention_bias=hf.attention_bias, use_sliding_window=getattr(hf, "use_sliding_window", False))
    refuse_other_activations(hf)
    layers = [_layer(hf, index, attention) for index in range(hf.num_hidden_layers)]
    return gqa.decoder_spec(hf, layers, DecoderAdapter)


def _layer(hf: Any, index: int, attention: str) -> gqa.GqaBlock.Config:
    norms = {"q_norm": norm(hf, hf.head_dim), "k_norm": norm(hf, hf.head_dim)}
    attend = gqa.attention(hf, attention, rope=rotary(hf), **norms)
    moe = hasattr(hf, "num_experts") and index not in hf.mlp_only_layers and (index + 1) % hf.decoder_sparse_step == 0
    if not moe:
        return gqa.block(hf, attend, feed_forward=ffn(hf, hf.intermediate_size))
    experts = swiglu_experts(hf, hf.num_experts, hf.moe_intermediate_size)
    normalize = getattr(hf, "norm_topk_prob", True)
    return gqa.block(hf, attend, moe=softmax_moe(hf, hf.num_experts, experts, normalize=normalize))

"""torchtitan model of MiniMax-M2."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.checkpoint_names import DECODER, MOE, TableAdapter, renamed
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import norm, refuse, refuse_other_activations
from primeslurm.nn.layers.moe import sigmoid_moe, swiglu_experts
from primeslurm.nn.layers.rotary import rotary


class MiniMaxM2Adapter(TableAdapter):
    """State dict adapter between this model and MiniMax-M2 checkpoints."""

    names = DECODER | renamed(
        MOE,
        {
            ".mlp.gate.e_score": ".mlp.e_score",
            ".mlp.": ".block_sparse_moe.",
            "}.gate_proj.": "}.w1.",
            "}.up_proj.": "}.w3.",
            "}.down_proj.": "}.w2.",
        },
    )


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    refuse(hf, router_jitter_noise=hf.router_jitter_noise)
    refuse_other_activations(hf)
    layers = [_layer(hf, attention) for _ in range(hf.num_hidden_layers)]
    return gqa.decoder_spec(hf, layers, MiniMaxM2Adapter)


def _layer(hf: Any, attention: str) -> gqa.GqaBlock.Config:
    # Unlike in other families, queries and keys are normalized over all heads.
    q_norm, k_norm = (norm(hf, heads * hf.head_dim) for heads in (hf.num_attention_heads, hf.num_key_value_heads))
    experts = hf.num_local_experts
    return gqa.block(
        hf,
        gqa.attention(hf, attention, rope=rotary(hf), q_norm=q_norm, k_norm=k_norm),
        moe=sigmoid_moe(hf, experts, swiglu_experts(hf, experts, hf.intermediate_size)),
    )

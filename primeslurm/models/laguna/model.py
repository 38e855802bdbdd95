"""torchtitan model of Laguna."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.checkpoint_names import DECODER, MOE, TableAdapter, renamed
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import linear, norm, refuse, refuse_other_activations
from primeslurm.nn.layers.moe import dense_or_moe
from primeslurm.nn.layers.rotary import rotary


class LagunaAdapter(TableAdapter):
    """State dict adapter between this model and Laguna checkpoints."""

    names = renamed(
        DECODER | MOE,
        {
            "mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias",
            "mlp.shared_experts.": "mlp.shared_expert.",
        },
    ) | {"model.layers.{}.self_attn.g_proj.weight": "layers.{}.attention.gate.weight"}


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    refuse(hf, moe_router_logit_softcapping=hf.moe_router_logit_softcapping)
    refuse_other_activations(hf)
    layers = [_layer(hf, index, attention) for index in range(hf.num_hidden_layers)]
    return gqa.decoder_spec(hf, layers, LagunaAdapter)


def _layer(hf: Any, index: int, attention: str) -> gqa.GqaBlock.Config:
    kind, heads = hf.layer_types[index], hf.num_attention_heads_per_layer[index]
    return gqa.block(
        hf,
        gqa.attention(
            hf,
            attention,
            heads=heads,
            window=hf.sliding_window if kind == "sliding_attention" else None,
            bias=hf.attention_bias,
            output_bias=hf.attention_bias,
            rope=rotary(hf, kind),
            q_norm=norm(hf, hf.head_dim),
            k_norm=norm(hf, hf.head_dim),
            gate=linear(hf.hidden_size, heads * hf.head_dim if hf.gating == "per-element" else heads),
            gate_activation="softplus",
        ),
        **dense_or_moe(
            hf,
            dense=hf.mlp_layer_types[index] == "dense",
            experts=hf.num_experts,
            shared_width=hf.shared_expert_intermediate_size,
            scale=hf.moe_routed_scaling_factor,
        ),
    )

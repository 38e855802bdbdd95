"""torchtitan model of AFMoE (Arcee Trinity)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common import Embedding
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.checkpoint_names import DECODER, MOE, TableAdapter, renamed
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import MATRIX, linear, norm, refuse_other_activations
from primeslurm.nn.layers.moe import dense_or_moe
from primeslurm.nn.layers.rotary import rotary


class AfmoeAdapter(TableAdapter):
    """State dict adapter between this model and AFMoE checkpoints."""

    names = renamed(
        DECODER | MOE,
        {
            "post_attention_layernorm": "pre_mlp_layernorm",
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
            "mlp.gate.": "mlp.router.gate.",
        },
    ) | {
        "model.layers.{}.post_attention_layernorm.weight": "layers.{}.post_attention_norm.weight",
        "model.layers.{}.post_mlp_layernorm.weight": "layers.{}.post_ffn_norm.weight",
        "model.layers.{}.self_attn.gate_proj.weight": "layers.{}.attention.gate.weight",
    }


class ScaledEmbedding(Embedding):
    """A token embedding that multiplies its output by a constant (muP)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        scale: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scale = config.scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    refuse_other_activations(hf)
    layers = [_layer(hf, index, attention) for index in range(hf.num_hidden_layers)]
    embedding = ScaledEmbedding.Config(
        num_embeddings=hf.vocab_size,
        embedding_dim=hf.hidden_size,
        param_init=MATRIX,
        scale=hf.hidden_size**0.5 if hf.mup_enabled else 1.0,
    )
    return gqa.decoder_spec(hf, layers, AfmoeAdapter, tok_embeddings=embedding)


def _layer(hf: Any, index: int, attention: str) -> gqa.GqaBlock.Config:
    local = hf.layer_types[index] == "sliding_attention"
    return gqa.block(
        hf,
        gqa.attention(
            hf,
            attention,
            window=hf.sliding_window if local else None,
            bias=hf.attention_bias,
            output_bias=hf.attention_bias,
            rope=rotary(hf) if local else None,  # global layers have no positions
            q_norm=norm(hf, hf.head_dim),
            k_norm=norm(hf, hf.head_dim),
            gate=linear(hf.hidden_size, hf.num_attention_heads * hf.head_dim),
        ),
        post_attention_norm=norm(hf, hf.hidden_size),
        post_ffn_norm=norm(hf, hf.hidden_size),
        **dense_or_moe(
            hf,
            dense=index < hf.num_dense_layers,
            experts=hf.num_experts,
            shared_width=hf.moe_intermediate_size * hf.num_shared_experts,
            scale=hf.route_scale,
        ),
    )

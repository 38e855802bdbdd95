"""torchtitan model of GLM-4.5 to GLM-4.7, and INTELLECT-3."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.checkpoint_names import DecoderAdapter
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import norm, refuse_other_activations
from primeslurm.nn.layers.moe import dense_or_moe
from primeslurm.nn.layers.rotary import rotary


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    refuse_other_activations(hf)
    layers = [_layer(hf, index, attention) for index in range(hf.num_hidden_layers)]
    return gqa.decoder_spec(hf, layers, DecoderAdapter)


def _layer(hf: Any, index: int, attention: str) -> gqa.GqaBlock.Config:
    # GLM-4.5-Air has no query and key norms.
    qk_norm = {name: norm(hf, hf.head_dim) for name in ("q_norm", "k_norm") if hf.use_qk_norm}
    return gqa.block(
        hf,
        gqa.attention(hf, attention, bias=hf.attention_bias, rope=rotary(hf), **qk_norm),
        **dense_or_moe(
            hf,
            dense=index < hf.first_k_dense_replace,
            experts=hf.n_routed_experts,
            shared_width=hf.moe_intermediate_size * hf.n_shared_experts,
            normalize=hf.norm_topk_prob,
            scale=hf.routed_scaling_factor,
            groups=(hf.n_group, hf.topk_group),
        ),
    )

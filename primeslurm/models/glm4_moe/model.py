"""GLM-4.5 and its kin (GLM-4.6, GLM-4.7, INTELLECT-3)."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.adapters.table import DECODER, MOE, TableAdapter
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import norm, refuse, silu_only
from primeslurm.nn.layers.moe import dense_or_moe
from primeslurm.nn.layers.rotary import rotary


class Glm4MoeAdapter(TableAdapter):
    """Names of GLM-4.5 checkpoints."""

    names = DECODER | MOE


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """Make the torchtitan spec of a GLM-4.5 config. Raises ValueError for features that are not implemented."""
    refuse(hf, **silu_only(hf))
    layers = [_layer(hf, index, attention) for index in range(hf.num_hidden_layers)]
    return gqa.model_spec(hf, layers, Glm4MoeAdapter)


def _layer(hf: Any, index: int, attention: str) -> gqa.GqaBlock.Config:
    dense = index < hf.first_k_dense_replace
    qk_norm = {name: norm(hf, hf.head_dim) for name in ("q_norm", "k_norm") if hf.use_qk_norm}
    return gqa.GqaBlock.Config(
        attention_norm=norm(hf, hf.hidden_size),
        attention=gqa.attention(hf, attention, bias=hf.attention_bias, rope=rotary(hf), **qk_norm),
        ffn_norm=norm(hf, hf.hidden_size),
        **dense_or_moe(
            hf,
            dense,
            experts=hf.n_routed_experts,
            shared_width=hf.moe_intermediate_size * hf.n_shared_experts,
            normalise=hf.norm_topk_prob,
            scale=hf.routed_scaling_factor,
            groups=(hf.n_group, hf.topk_group),
        ),
    )

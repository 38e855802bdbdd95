"""Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.adapters.table import DECODER, MOE, TableAdapter
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import EXPERTS, MATRIX, ffn, norm, refuse, silu_only
from primeslurm.nn.layers.rotary import rotary


class Qwen3Adapter(TableAdapter):
    """Names of Qwen3 checkpoints."""

    names = DECODER | MOE


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """Make the torchtitan spec of a Qwen3 config. Raises ValueError for features that are not implemented."""
    window = getattr(hf, "use_sliding_window", False)  # Qwen3-VL has none
    refuse(hf, attention_bias=hf.attention_bias, use_sliding_window=window, **silu_only(hf))
    layers = [_layer(hf, index, attention) for index in range(hf.num_hidden_layers)]
    return gqa.model_spec(hf, layers, Qwen3Adapter)


def _is_moe(hf: Any, index: int) -> bool:
    if not hasattr(hf, "num_experts"):
        return False
    return index not in hf.mlp_only_layers and (index + 1) % hf.decoder_sparse_step == 0


def _layer(hf: Any, index: int, attention: str) -> gqa.GqaBlock.Config:
    moe = _is_moe(hf, index)
    return gqa.GqaBlock.Config(
        attention_norm=norm(hf, hf.hidden_size),
        attention=gqa.attention(
            hf, attention, rope=rotary(hf), q_norm=norm(hf, hf.head_dim), k_norm=norm(hf, hf.head_dim)
        ),
        ffn_norm=norm(hf, hf.hidden_size),
        feed_forward=None if moe else ffn(hf, hf.intermediate_size),
        moe=_moe(hf) if moe else None,
    )


def _moe(hf: Any) -> MoE.Config:
    return make_moe_config(
        num_experts=hf.num_experts,
        # A load-balancing bias would move the router away from what the engines, which do not know it, compute.
        load_balance_coeff=None,
        router=make_router_config(
            dim=hf.hidden_size,
            num_experts=hf.num_experts,
            gate_param_init=MATRIX,
            top_k=hf.num_experts_per_tok,
            score_func="softmax",
            route_norm=getattr(hf, "norm_topk_prob", True),  # Qwen3-VL has no choice
        ),
        routed_experts=make_routed_experts_config(
            dim=hf.hidden_size,
            hidden_dim=hf.moe_intermediate_size,
            num_experts=hf.num_experts,
            top_k=hf.num_experts_per_tok,
            param_init=EXPERTS,
            comm_backend="standard",
        ),
    )

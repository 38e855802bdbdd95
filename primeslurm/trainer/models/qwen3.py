"""Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from primeslurm.trainer import compat  # noqa: F401  isort: skip  (before torchtitan)
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.trainer.models.common import EXPERTS, MATRIX, ends, norm, refuse, rope_theta


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """The torchtitan spec of a Qwen3 config. Raises ValueError for features that are not implemented."""
    refuse(
        hf,
        attention_bias=hf.attention_bias,
        use_sliding_window=hf.use_sliding_window,
        activation="" if hf.hidden_act == "silu" else hf.hidden_act,
    )
    layers = [_layer(hf, index, seq_len, attention) for index in range(hf.num_hidden_layers)]
    model = Qwen3Model.Config(**ends(hf), layers=layers)
    return ModelSpec(
        name="qwen3",
        flavor=hf.model_type,
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter,
    )


def _is_moe(hf: Any, index: int) -> bool:
    if not hasattr(hf, "num_experts"):
        return False
    return index not in hf.mlp_only_layers and (index + 1) % hf.decoder_sparse_step == 0


def _layer(hf: Any, index: int, seq_len: int, attention: str) -> Qwen3TransformerBlock.Config:
    moe = _is_moe(hf, index)
    return Qwen3TransformerBlock.Config(
        attention_norm=norm(hf, hf.hidden_size),
        ffn_norm=norm(hf, hf.hidden_size),
        # Unfused: a fused projection makes state_dict() a collective that keeps replicated copies of q, k and v.
        attention=make_gqa_config(
            dim=hf.hidden_size,
            n_heads=hf.num_attention_heads,
            n_kv_heads=hf.num_key_value_heads,
            head_dim=hf.head_dim,
            wqkv_param_init=MATRIX,
            wo_param_init=MATRIX,
            inner_attention=get_attention_config(attention),
            rope=CosSinRoPE.Config(dim=hf.head_dim, max_seq_len=seq_len, theta=rope_theta(hf)),
            qk_norm=norm(hf, hf.head_dim),
            fuse_qkv=False,
        ),
        feed_forward=None
        if moe
        else make_ffn_config(
            dim=hf.hidden_size, hidden_dim=hf.intermediate_size, w1_param_init=MATRIX, w2w3_param_init=MATRIX
        ),
        moe=_moe(hf) if moe else None,
    )


def _moe(hf: Any) -> Any:
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
            route_norm=hf.norm_topk_prob,
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

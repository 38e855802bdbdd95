"""DeepSeek-V3 and Kimi-K2: latent attention, and expert groups with a sigmoid router and a selection bias."""

from __future__ import annotations

from typing import Any

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, build_mla_moe_layers, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.layers.common import (
    EXPERTS,
    MATRIX,
    NORM,
    embedding_and_head,
    model_spec,
    norm,
    refuse,
    refuse_other_activations,
)

# Epsilon of the norms of compressed queries and keys. `rms_norm_eps` of the config does not apply to them.
LATENT_EPS = 1e-6


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    model = DeepSeekV3Model.Config(**embedding_and_head(hf), layers=layers(hf, seq_len, attention))
    return model_spec(hf, "deepseek_v3", model, DeepSeekV3StateDictAdapter, parallelize_deepseekv3, pipeline_llm)


def layers(hf: Any, seq_len: int, attention: str) -> list[Any]:
    """Return the configs of the decoder layers of a transformers config `hf` with latent attention."""
    refuse_other_activations(hf)
    refuse(
        hf,
        attention_bias=hf.attention_bias,
        tie_word_embeddings=hf.tie_word_embeddings,
        rope_interleave="" if getattr(hf, "rope_interleave", True) else "false",
        n_shared_experts="" if hf.n_shared_experts else "0",
    )
    rope, mscale = _rotary(hf, seq_len)
    groups = hf.n_group if hf.n_group and hf.n_group > 1 else None
    result = build_mla_moe_layers(
        n_layers=hf.num_hidden_layers,
        n_dense_layers=_dense_layers(hf),
        dim=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        q_lora_rank=hf.q_lora_rank or 0,
        kv_lora_rank=hf.kv_lora_rank,
        qk_nope_head_dim=hf.qk_nope_head_dim,
        qk_rope_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        mscale=mscale,
        dense_hidden_dim=hf.intermediate_size,
        moe_hidden_dim=hf.moe_intermediate_size,
        num_experts=hf.n_routed_experts,
        num_shared_experts=hf.n_shared_experts,
        router_top_k=hf.num_experts_per_tok,
        router_score_func="sigmoid",
        router_num_expert_groups=groups,
        router_num_limited_groups=hf.topk_group if groups else None,
        router_route_scale=hf.routed_scaling_factor,
        router_route_norm=hf.norm_topk_prob,
        attn_backend=attention,
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=MATRIX,
        norm_init=NORM,
        depth_init=lambda _: MATRIX,
        depth_experts_init=lambda _: EXPERTS,
        rope=rope,
    )
    for layer in result:
        layer.attention_norm = norm(hf, hf.hidden_size)
        layer.ffn_norm = norm(hf, hf.hidden_size)
        layer.attention.q_norm.eps = layer.attention.kv_norm.eps = LATENT_EPS
    return list(result)


def _dense_layers(hf: Any) -> int:
    """Return the number of dense layers, which must come before all layers with experts."""
    kinds = getattr(hf, "mlp_layer_types", None)
    if kinds is None:
        return int(hf.first_k_dense_replace)
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    refuse(hf, **{"dense layers after": "sparse ones" if "dense" in kinds[dense:] else ""})
    return int(dense)


def _rotary(hf: Any, seq_len: int) -> tuple[ComplexRoPE.Config, float]:
    """Return the rotary embedding, and the `mscale` by which YaRN scales the softmax."""
    rope = hf.rope_parameters
    scaling = rope.get("rope_type", "default")
    plain: dict[str, Any] = {"dim": hf.qk_rope_head_dim, "max_seq_len": seq_len, "theta": float(rope["rope_theta"])}
    if scaling == "default":
        return ComplexRoPE.Config(**plain), 0.0
    # YaRN has a factor for the rotary part of a score, and one for the whole score (`mscale_all_dim`). All released
    # models set both alike, which makes the first 1. Nothing else is implemented.
    mscale = rope.get("mscale_all_dim")
    alike = mscale and rope.get("mscale") == mscale and rope.get("attention_factor") in (None, 1.0)
    refuse(
        hf,
        **{
            "RoPE scaling": "" if scaling == "yarn" else scaling,
            "mscale_all_dim": "" if alike else f"{mscale} beside mscale {rope.get('mscale')}",
        },
    )
    config = ComplexRoPE.Config(
        **plain,
        scaling="yarn",
        rope_factor=float(rope["factor"]),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        original_seq_len=int(rope["original_max_position_embeddings"]),
        truncate=bool(rope.get("truncate", True)),
    )
    return config, float(mscale)

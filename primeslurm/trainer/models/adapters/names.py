"""Tensor names that most Hugging Face checkpoints agree on, for `TableAdapter`."""

from __future__ import annotations

from collections.abc import Mapping

_LAYER = "model.layers.{}."
_ATTENTION = {"q_proj": "qkv_linear.wq", "k_proj": "qkv_linear.wk", "v_proj": "qkv_linear.wv", "o_proj": "wo"}
_FFN = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EXPERTS = "layers.{}.moe.routed_experts.inner_experts."

DECODER: dict[str, str] = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    _LAYER + "input_layernorm.weight": "layers.{}.attention_norm.weight",
    _LAYER + "post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    _LAYER + "self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
    _LAYER + "self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
    **{
        f"{_LAYER}self_attn.{hf}.{kind}": f"layers.{{}}.attention.{ours}.{kind}"
        for hf, ours in _ATTENTION.items()
        for kind in ("weight", "bias")
    },
    **{f"{_LAYER}mlp.{hf}.weight": f"layers.{{}}.feed_forward.{ours}.weight" for hf, ours in _FFN.items()},
}
"""A dense decoder."""

MOE: dict[str, str] = {
    _LAYER + "mlp.gate.weight": "layers.{}.moe.router.gate.weight",
    _LAYER + "mlp.gate.e_score_correction_bias": "layers.{}.moe.expert_bias_E",
    _LAYER + "mlp.experts.{}.gate_proj.weight": _EXPERTS + "w1_EFD",
    _LAYER + "mlp.experts.{}.up_proj.weight": _EXPERTS + "w3_EFD",
    _LAYER + "mlp.experts.{}.down_proj.weight": _EXPERTS + "w2_EDF",
    **{
        f"{_LAYER}mlp.shared_experts.{hf}.weight": f"layers.{{}}.moe.shared_experts.{ours}.weight"
        for hf, ours in _FFN.items()
    },
}
"""Its mixtures of experts."""


def renamed(names: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """`names`, with the keys of `changes` replaced by their values, in order, in every Hugging Face name."""
    result = dict(names)
    for old, new in changes.items():
        result = {hf.replace(old, new): ours for hf, ours in result.items()}
    return result

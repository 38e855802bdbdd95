"""Names of gpt-oss checkpoints in bfloat16 or float32."""

from __future__ import annotations

from primeslurm.nn.adapters import TableAdapter

EXPERT_PARAMETERS = ("gate_up_EDG", "gate_up_bias_EG", "down_EFD", "down_bias_ED")


class GptOssAdapter(TableAdapter):
    """See the module."""

    names = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        **{
            f"model.layers.{{}}.self_attn.{hf}_proj.{kind}": f"layers.{{}}.attention.{ours}.{kind}"
            for hf, ours in (("q", "qkv_linear.wq"), ("k", "qkv_linear.wk"), ("v", "qkv_linear.wv"), ("o", "wo"))
            for kind in ("weight", "bias")
        },
        "model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks",
        "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
        "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
        "model.layers.{}.mlp.router.weight": "layers.{}.moe.router.gate.weight",
        "model.layers.{}.mlp.router.bias": "layers.{}.moe.router.gate.bias",
        **{
            f"model.layers.{{}}.mlp.experts.{hf}": f"layers.{{}}.moe.routed_experts.inner_experts.{ours}"
            for hf, ours in zip(
                ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"), EXPERT_PARAMETERS, strict=True
            )
        },
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
    }

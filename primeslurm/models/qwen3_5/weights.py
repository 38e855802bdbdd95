"""State dict adapters between the Qwen3.5 model and its three kinds of checkpoints."""

from __future__ import annotations

from dataclasses import replace

from primeslurm.nn.checkpoint_names import DraftFormat, StackedAdapter, TableAdapter, VisionAdapter, renamed


class Qwen35Adapter(TableAdapter):
    """State dict adapter for text-only checkpoints."""

    names = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        **{
            f"model.layers.{{}}.{hf}": f"layers.{{}}.{ours}"
            for hf, ours in {
                "input_layernorm.weight": "attention_norm.weight",
                "post_attention_layernorm.weight": "ffn_norm.weight",
                "self_attn.q_proj.weight": "attention.wq.weight",
                "self_attn.k_proj.weight": "attention.wk.weight",
                "self_attn.v_proj.weight": "attention.wv.weight",
                "self_attn.o_proj.weight": "attention.wo.weight",
                "self_attn.q_norm.weight": "attention.q_norm.weight",
                "self_attn.k_norm.weight": "attention.k_norm.weight",
                "linear_attn.in_proj_qkv.weight": "delta_net.in_proj_qkv.weight",
                "linear_attn.in_proj_z.weight": "delta_net.in_proj_z.weight",
                "linear_attn.in_proj_a.weight": "delta_net.in_proj_a.weight",
                "linear_attn.in_proj_b.weight": "delta_net.in_proj_b.weight",
                "linear_attn.out_proj.weight": "delta_net.out_proj.weight",
                "linear_attn.conv1d.weight": "delta_net.conv_weight",
                "linear_attn.dt_bias": "delta_net.dt_bias",
                "linear_attn.A_log": "delta_net.A_log",
                "linear_attn.norm.weight": "delta_net.norm_weight",
                "mlp.gate_proj.weight": "feed_forward.w1.weight",
                "mlp.up_proj.weight": "feed_forward.w3.weight",
                "mlp.down_proj.weight": "feed_forward.w2.weight",
                "mlp.gate.weight": "moe.router.gate.weight",
                "mlp.shared_expert.gate_proj.weight": "moe.shared_experts.w1.weight",
                "mlp.shared_expert.up_proj.weight": "moe.shared_experts.w3.weight",
                "mlp.shared_expert.down_proj.weight": "moe.shared_experts.w2.weight",
                "mlp.shared_expert_gate.weight": "moe.shared_experts.gate.weight",
                "mlp.experts.{}.gate_proj.weight": "moe.routed_experts.inner_experts.w1_EFD",
                "mlp.experts.{}.up_proj.weight": "moe.routed_experts.inner_experts.w3_EFD",
                "mlp.experts.{}.down_proj.weight": "moe.routed_experts.inner_experts.w2_EDF",
            }.items()
        },
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    draft_format = DraftFormat(
        decoder_layer="model.layers.{}.",
        layer="mtp.layers.0.",
        outside={
            "tok_embeddings.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
            "tok_embeddings.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
            "tok_embeddings.eh_proj.weight": "mtp.fc.weight",
            "norm.weight": "mtp.norm.weight",
        },
        sees_first_embedding=True,
    )


_WITH_VISION = renamed(Qwen35Adapter.names, {"model.": "model.language_model."})
_DRAFT_WITH_VISION = replace(Qwen35Adapter.draft_format, decoder_layer="model.language_model.layers.{}.")


class StackedVisionAdapter(StackedAdapter):
    """State dict adapter for released bfloat16 checkpoints with stacked experts and a vision encoder."""

    names = {hf: ours for hf, ours in _WITH_VISION.items() if ".experts." not in hf}
    experts = "model.language_model.layers.{}.mlp.experts"
    draft_format = _DRAFT_WITH_VISION


class Qwen35VisionAdapter(VisionAdapter):
    """State dict adapter for checkpoints with a vision encoder, and experts one by one."""

    names = _WITH_VISION
    draft_format = _DRAFT_WITH_VISION
    stacked = StackedVisionAdapter

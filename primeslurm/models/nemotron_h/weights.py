"""Names of Nemotron-H checkpoints."""

from __future__ import annotations

from primeslurm.nn.adapters import TableAdapter


class NemotronHAdapter(TableAdapter):
    """See the module."""

    names = {
        "backbone.embeddings.weight": "tok_embeddings.weight",
        "backbone.layers.{}.norm.weight": "layers.{}.norm.weight",
        **{
            f"backbone.layers.{{}}.mixer.{hf}": f"layers.{{}}.{ours}"
            for hf, ours in {
                "in_proj.weight": "mamba.in_proj.weight",
                "out_proj.weight": "mamba.out_proj.weight",
                "conv1d.weight": "mamba.conv_weight",
                "conv1d.bias": "mamba.conv_bias",
                "dt_bias": "mamba.dt_bias",
                "A_log": "mamba.A_log",
                "D": "mamba.D",
                "norm.weight": "mamba.norm_weight",
                "q_proj.weight": "attention.qkv_linear.wq.weight",
                "k_proj.weight": "attention.qkv_linear.wk.weight",
                "v_proj.weight": "attention.qkv_linear.wv.weight",
                "o_proj.weight": "attention.wo.weight",
                "up_proj.weight": "feed_forward.w1.weight",
                "down_proj.weight": "feed_forward.w2.weight",
                "gate.weight": "moe.router.gate.weight",
                "gate.e_score_correction_bias": "moe.expert_bias_E",
                "shared_experts.up_proj.weight": "moe.shared_experts.w1.weight",
                "shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
                "fc1_latent_proj.weight": "moe.routed_experts.down.weight",
                "fc2_latent_proj.weight": "moe.routed_experts.up.weight",
                "experts.{}.up_proj.weight": "moe.routed_experts.inner_experts.w1_EFD",
                "experts.{}.down_proj.weight": "moe.routed_experts.inner_experts.w2_EDF",
            }.items()
        },
        "backbone.norm_f.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
    }

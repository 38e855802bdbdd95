"""Nemotron-H: each layer is one of Mamba-2, attention, feed-forward network or (latent) mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.attention import AttentionMasksType, GQAttention
from torchtitan.models.common.config_utils import get_attention_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from primeslurm.models.nemotron_h import relu2
from primeslurm.models.nemotron_h.mamba import Mamba2
from primeslurm.nn.checkpoint_names import TableAdapter
from primeslurm.nn.layers.common import MATRIX, build_parts, embedding_and_head, linear, model_spec, norm, refuse
from primeslurm.nn.layers.moe import routed, shard_experts, sigmoid_moe
from primeslurm.nn.layers.parallelize import parallelize


class NemotronHAdapter(TableAdapter):
    """State dict adapter between this model and Nemotron-H checkpoints."""

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


class NoPositions(Module):
    """Stands in for rotary embeddings: returns queries and keys unchanged, because attention has no positions."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


class NemotronHBlock(Module):
    """A layer: a norm, then Mamba-2, attention, a feed-forward network or experts. The other three are None."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        norm: RMSNorm.Config
        mamba: Mamba2.Config | None = None
        attention: GQAttention.Config | None = None
        feed_forward: relu2.Relu2FeedForward.Config | None = None
        moe: MoE.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        build_parts(self, config, "norm", "mamba", "attention", "feed_forward", "moe")
        self.moe_enabled = config.moe is not None

    def forward(
        self, x: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        normed = self.norm(x)
        if self.mamba is not None:
            return x + self.mamba(normed, positions)
        if self.attention is not None:
            return x + self.attention(normed, attention_masks, positions)
        return x + (self.moe or self.feed_forward)(normed)


class NemotronHDecoder(Decoder):
    """A decoder of Nemotron-H blocks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                if layer.moe is not None:
                    shard_experts(layer.moe, *relu2.EXPERT_PARAMETERS)


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    refuse(
        hf,
        use_bias=hf.use_bias,
        mlp_bias=hf.mlp_bias,
        sliding_window=hf.sliding_window,
        tie_word_embeddings=hf.tie_word_embeddings,
        mlp_activation="" if hf.mlp_hidden_act == "relu2" else hf.mlp_hidden_act,
        mamba_activation="" if hf.mamba_hidden_act == "silu" else hf.mamba_hidden_act,
    )
    layers = [
        NemotronHBlock.Config(norm=norm(hf, hf.hidden_size), **_mixer(hf, kind, attention)) for kind in hf.layer_types
    ]
    model = NemotronHDecoder.Config(**embedding_and_head(hf), layers=layers)
    return model_spec(hf, "nemotron_h", model, NemotronHAdapter, parallelize)


def _mixer(hf: Any, kind: str, attention: str) -> dict[str, Any]:
    if kind == "linear_attention":
        return {"mamba": _mamba(hf)}
    if kind == "full_attention":
        return {"attention": _attention(hf, attention)}
    if kind == "moe":
        return {"moe": _moe(hf)}
    return {"feed_forward": _feed_forward(hf, hf.intermediate_size)}


def _mamba(hf: Any) -> Mamba2.Config:
    inner, mixed = hf.mamba_num_heads * hf.mamba_head_dim, hf.n_groups * hf.ssm_state_size
    return Mamba2.Config(
        in_proj=linear(hf.hidden_size, 2 * inner + 2 * mixed + hf.mamba_num_heads),
        out_proj=linear(inner, hf.hidden_size),
        heads=hf.mamba_num_heads,
        head_dim=hf.mamba_head_dim,
        groups=hf.n_groups,
        state=hf.ssm_state_size,
        conv_width=hf.conv_kernel,
        conv_bias=hf.use_conv_bias,
        chunk=hf.chunk_size,
        min_step=hf.time_step_min,  # transformers ignores time_step_limit, too
        eps=hf.layer_norm_epsilon,
        param_init={
            **dict.fromkeys(("conv_weight", "conv_bias", "dt_bias", "A_log"), nn.init.zeros_),
            **dict.fromkeys(("D", "norm_weight"), nn.init.ones_),
        },
    )


def _attention(hf: Any, backend: str) -> GQAttention.Config:
    return make_gqa_config(
        dim=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        wqkv_param_init=MATRIX,
        wo_param_init=MATRIX,
        inner_attention=get_attention_config(backend),
        rope=NoPositions.Config(),
    )


def _feed_forward(hf: Any, width: int) -> relu2.Relu2FeedForward.Config:
    return relu2.Relu2FeedForward.Config(w1=linear(hf.hidden_size, width), w2=linear(width, hf.hidden_size))


def _moe(hf: Any) -> MoE.Config:
    # Latent experts compute in a narrower hidden size, between two projections.
    latent = hf.moe_latent_size
    experts = relu2.Relu2Experts.Config(
        dim=latent or hf.hidden_size,
        hidden_dim=hf.moe_intermediate_size,
        num_experts=hf.n_routed_experts,
        param_init=dict.fromkeys(relu2.EXPERT_PARAMETERS, MATRIX["weight"]),
    )
    if latent:
        through = {"down": linear(hf.hidden_size, latent), "up": linear(latent, hf.hidden_size)}
        routed_experts = routed(experts, hf.num_experts_per_tok, relu2.LatentExperts, **through)
    else:
        routed_experts = routed(experts, hf.num_experts_per_tok)
    return sigmoid_moe(
        hf,
        hf.n_routed_experts,
        routed_experts,
        _feed_forward(hf, hf.moe_shared_expert_intermediate_size),
        normalize=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        groups=(hf.n_group, hf.topk_group),
    )

"""Qwen3.5: gated delta nets, gated attention in every fourth layer, and a vision encoder in released checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import AttentionMasksType, BaseAttention
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from primeslurm.models.qwen3_5.delta_net import DeltaNet
from primeslurm.models.qwen3_5.weights import Qwen35Adapter, Qwen35VisionAdapter
from primeslurm.nn.layers import vision
from primeslurm.nn.layers.common import (
    EXPERTS,
    build_parts,
    embedding_and_head,
    ffn,
    linear,
    model_spec,
    refuse,
    refuse_other_activations,
)
from primeslurm.nn.layers.moe import routed, shard_experts, softmax_moe
from primeslurm.nn.layers.rotary import Rotary, rotary


class OffsetNorm(Module):
    """An RMSNorm whose weights are stored as differences from 1."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        # float32 throughout, as in transformers.
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.float())).to(x.dtype)


class GatedAttention(BaseAttention):
    """Grouped-query attention with rotary embeddings on a part of each head, and a gate on its output."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        head_dim: int
        wq: Linear.Config
        """Projection to the query of each head, followed by the gate of that head."""
        wk: Linear.Config
        wv: Linear.Config
        wo: Linear.Config
        q_norm: OffsetNorm.Config
        k_norm: OffsetNorm.Config
        rope: Rotary.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        build_parts(self, config, "wq", "wk", "wv", "wo", "q_norm", "k_norm", "rope", "inner_attention")

    def forward(
        self, x: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, gate = self.wq(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wk, self.wv))
        q, k = self.rope(self.q_norm(q), self.k_norm(k), positions)
        out = self.inner_attention(
            q, k, v, attention_masks=attention_masks, scale=self.head_dim**-0.5, enable_gqa=q.shape[2] > k.shape[2]
        )
        return self.wo((out * torch.sigmoid(gate)).flatten(2))


class Qwen35Block(Module):
    """A delta net or attention, then a feed-forward network or experts. Unused parts are None."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        attention_norm: OffsetNorm.Config
        ffn_norm: OffsetNorm.Config
        attention: GatedAttention.Config | None = None
        delta_net: DeltaNet.Config | None = None
        feed_forward: FeedForward.Config | None = None
        moe: MoE.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        build_parts(self, config, "attention_norm", "ffn_norm", "attention", "delta_net", "feed_forward", "moe")
        self.moe_enabled = config.moe is not None

    def forward(
        self, x: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor
    ) -> torch.Tensor:
        normed = self.attention_norm(x)
        if self.attention is not None:
            x = x + self.attention(normed, attention_masks, positions)
        else:
            x = x + self.delta_net(normed, vision.document_positions(positions))
        second_half = self.feed_forward if self.moe is None else self.moe
        return x + second_half(self.ffn_norm(x))


class Qwen35Decoder(vision.Decoder):
    """A decoder of Qwen3.5 blocks, with or without a vision encoder."""

    @dataclass(kw_only=True, slots=True)
    class Config(vision.Decoder.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            vision.Decoder.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                if layer.moe is not None:
                    shard_experts(layer.moe, *EXPERTS)


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    # Text-only models have no enclosing config.
    whole, hf = hf, hf.get_text_config()
    refuse(hf, attention_bias=hf.attention_bias)
    refuse_other_activations(hf)
    layers = [_layer(hf, kind == "full_attention", attention) for kind in hf.layer_types]
    around = embedding_and_head(hf) | {
        "norm": _norm(hf, hf.hidden_size),
        "enable_weight_tying": whole.tie_word_embeddings,
    }
    encoder = None if whole is hf else vision.VisionEncoder.Config(hf=whole.vision_config)
    model = Qwen35Decoder.Config(**around, layers=layers, vision=encoder)
    return model_spec(whole, "qwen3_5", model, Qwen35VisionAdapter if encoder else Qwen35Adapter, vision.parallelize)


def _layer(hf: Any, full_attention: bool, backend: str) -> Qwen35Block.Config:
    moe = hasattr(hf, "num_experts")
    return Qwen35Block.Config(
        attention_norm=_norm(hf, hf.hidden_size),
        ffn_norm=_norm(hf, hf.hidden_size),
        attention=_attention(hf, backend) if full_attention else None,
        delta_net=None if full_attention else _net(hf),
        feed_forward=None if moe else ffn(hf, hf.intermediate_size),
        moe=_moe(hf) if moe else None,
    )


def _norm(hf: Any, dim: int) -> OffsetNorm.Config:
    return OffsetNorm.Config(dim=dim, eps=hf.rms_norm_eps, param_init={"weight": nn.init.zeros_})


def _attention(hf: Any, backend: str) -> GatedAttention.Config:
    queries, keys = hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
    return GatedAttention.Config(
        n_heads=hf.num_attention_heads,
        head_dim=hf.head_dim,
        wq=linear(hf.hidden_size, 2 * queries),
        wk=linear(hf.hidden_size, keys),
        wv=linear(hf.hidden_size, keys),
        wo=linear(queries, hf.hidden_size),
        q_norm=_norm(hf, hf.head_dim),
        k_norm=_norm(hf, hf.head_dim),
        rope=rotary(hf),
        inner_attention=get_attention_config(backend),
    )


def _net(hf: Any) -> DeltaNet.Config:
    keys = hf.linear_num_key_heads * hf.linear_key_head_dim
    values = hf.linear_num_value_heads * hf.linear_value_head_dim
    return DeltaNet.Config(
        in_proj_qkv=linear(hf.hidden_size, 2 * keys + values),
        in_proj_z=linear(hf.hidden_size, values),
        in_proj_a=linear(hf.hidden_size, hf.linear_num_value_heads),
        in_proj_b=linear(hf.hidden_size, hf.linear_num_value_heads),
        out_proj=linear(values, hf.hidden_size),
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_dim=hf.linear_key_head_dim,
        value_dim=hf.linear_value_head_dim,
        conv_width=hf.linear_conv_kernel_dim,
        eps=hf.rms_norm_eps,
        param_init={**dict.fromkeys(("conv_weight", "dt_bias", "A_log"), nn.init.zeros_), "norm_weight": nn.init.ones_},
    )


def _moe(hf: Any) -> MoE.Config:
    width = hf.shared_expert_intermediate_size
    experts = GroupedExperts.Config(
        dim=hf.hidden_size, hidden_dim=hf.moe_intermediate_size, num_experts=hf.num_experts, param_init=EXPERTS
    )
    shared = SigmoidGatedFeedForward.Config(
        w1=linear(hf.hidden_size, width),
        w2=linear(width, hf.hidden_size),
        w3=linear(hf.hidden_size, width),
        gate=linear(hf.hidden_size, 1),
    )
    return softmax_moe(hf, hf.num_experts, routed(experts, hf.num_experts_per_tok), shared)

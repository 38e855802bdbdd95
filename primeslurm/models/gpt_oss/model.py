"""torchtitan model of gpt-oss: attention sinks, sliding windows in every other layer, YaRN, and experts with biases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.model import Attention, GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.parallelize import parallelize_gptoss
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from primeslurm.nn.checkpoint_names import TableAdapter
from primeslurm.nn.kernels import host_value_cache
from primeslurm.nn.layers.common import embedding_and_head, linear, model_spec, norm, refuse, refuse_other_activations
from primeslurm.nn.layers.moe import local, routed, shard_experts, softmax_moe

EXPERT_PARAMETERS = ("gate_up_EDG", "gate_up_bias_EG", "down_EFD", "down_bias_ED")


class GptOssAdapter(TableAdapter):
    """Converts tensor names between this model and gpt-oss checkpoints in bfloat16 or float32."""

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


class GptOssExperts(GroupedExperts):
    """Experts with biases and a clamped SwiGLU, in the layout of the checkpoint.

    Shapes: E experts, D hidden size, F intermediate size, G = 2F with gate and up interleaved.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        alpha: float
        limit: float

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # skip the parameters of GroupedExperts
        self.num_experts, self.alpha, self.limit = config.num_experts, config.alpha, config.limit
        e, d, f = config.num_experts, config.dim, config.hidden_dim
        self.gate_up_EDG = nn.Parameter(torch.empty(e, d, 2 * f))
        self.gate_up_bias_EG = nn.Parameter(torch.empty(e, 2 * f))
        self.down_EFD = nn.Parameter(torch.empty(e, f, d))
        self.down_bias_ED = nn.Parameter(torch.empty(e, d))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs for tokens [rows, dim], which are sorted by expert."""
        gate_up, gate_up_bias, down, down_bias = (local(getattr(self, name), x_RD.dtype) for name in EXPERT_PARAMETERS)
        offsets = host_value_cache.ends(num_tokens_per_expert_E)

        def by_row(bias: torch.Tensor) -> torch.Tensor:
            return torch.repeat_interleave(bias, num_tokens_per_expert_E.long(), dim=0, output_size=x_RD.shape[0])

        hidden = self._grouped_mm(A=x_RD, B_t=gate_up, offs=offsets) + by_row(gate_up_bias)
        # Checkpoints interleave gate and up.
        gate = hidden[..., ::2].clamp(max=self.limit)
        up = hidden[..., 1::2].clamp(min=-self.limit, max=self.limit)
        hidden = gate * torch.sigmoid(gate * self.alpha) * (up + 1)
        return self._grouped_mm(A=hidden, B_t=down, offs=offsets) + by_row(down_bias)


class GptOssDecoder(GptOssModel):
    """torchtitan's gpt-oss decoder, with `GptOssExperts` in its layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssModel.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            GptOssModel.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                shard_experts(layer.moe, *EXPERT_PARAMETERS)


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    # `attention` is ignored: only flex attention can train sinks.
    refuse(hf, attention_bias="" if hf.attention_bias else "false")
    refuse_other_activations(hf)
    rope = _rope(hf, seq_len)
    layers = [
        GptOssTransformerBlock.Config(
            attention_norm=norm(hf, hf.hidden_size),
            ffn_norm=norm(hf, hf.hidden_size),
            attention=_attention(hf, kind, rope),
            moe=_moe(hf),
        )
        for kind in hf.layer_types
    ]
    model = GptOssDecoder.Config(**embedding_and_head(hf), layers=layers)
    return model_spec(hf, "gpt_oss", model, GptOssAdapter, parallelize_gptoss)


def _rope(hf: Any, seq_len: int) -> CosSinRoPE.Config:
    options = dict(hf.rope_parameters)
    scaling = options.pop("rope_type")
    rope = CosSinRoPE.Config(dim=hf.head_dim, max_seq_len=seq_len, theta=options.pop("rope_theta"))
    if scaling == "default":
        return rope
    supported = {"factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"}
    others = sorted(name for name, value in options.items() if value is not None and name not in supported)
    refuse(hf, **{"RoPE scaling": "" if scaling == "yarn" else scaling, "RoPE option": ", ".join(others)})
    return replace(
        rope,
        scaling="yarn",
        rope_factor=options["factor"],
        beta_fast=options.get("beta_fast") or 32.0,
        beta_slow=options.get("beta_slow") or 1.0,
        truncate=options.get("truncate", True),
        original_seq_len=options.get("original_max_position_embeddings") or hf.max_position_embeddings,
    )


def _attention(hf: Any, kind: str, rope: CosSinRoPE.Config) -> Attention.Config:
    return Attention.Config(
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        dim=hf.hidden_size,
        qkv_linear=QKVLinear.Config(
            head_dim=hf.head_dim,
            wq=linear(hf.hidden_size, hf.num_attention_heads * hf.head_dim, bias=True),
            wkv=linear(hf.hidden_size, hf.num_key_value_heads * hf.head_dim, bias=True),
        ),
        wo=linear(hf.num_attention_heads * hf.head_dim, hf.hidden_size, bias=True),
        sliding_window_size=hf.sliding_window if kind == "sliding_attention" else None,
        # Sinks scale outputs by the log-sum-exp of scores. Varlen kernels return it, but drop its gradient.
        inner_attention=get_attention_config("flex"),
        rope=replace(rope),
        param_init={"sinks": nn.init.zeros_},
    )


def _moe(hf: Any) -> Any:
    experts = GptOssExperts.Config(
        dim=hf.hidden_size,
        hidden_dim=hf.intermediate_size,
        num_experts=hf.num_local_experts,
        alpha=hf.swiglu_alpha,
        limit=hf.swiglu_limit,
        param_init=dict.fromkeys(EXPERT_PARAMETERS, nn.init.zeros_),
    )
    return softmax_moe(hf, hf.num_local_experts, routed(experts, hf.num_experts_per_tok), bias=True)

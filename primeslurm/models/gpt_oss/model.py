"""GPT-OSS: attention sinks, sliding windows in every other layer, YaRN, and experts with biases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.config_utils import get_attention_config, make_moe_config, make_router_config
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.model import Attention, GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.parallelize import parallelize_gptoss
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from primeslurm.nn.adapters.table import TableAdapter
from primeslurm.nn.kernels import host_value_cache
from primeslurm.nn.layers.common import MATRIX, ends, linear, norm, refuse
from primeslurm.nn.layers.moe import local, routed, spread

_PARAMETERS = ("gate_up_EDG", "gate_up_bias_EG", "down_EFD", "down_bias_ED")


class GptOssExperts(GroupedExperts):
    """Experts with biases and a clamped SwiGLU, in the layout of the checkpoint.

    Shapes: E experts, D model width, F expert width, G = 2F with gate and up interleaved.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """GroupedExperts', and the constants of the activation."""

        alpha: float
        limit: float

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # not the parent's parameters
        self.num_experts, self.alpha, self.limit = config.num_experts, config.alpha, config.limit
        e, d, f = config.num_experts, config.dim, config.hidden_dim
        self.gate_up_EDG = nn.Parameter(torch.empty(e, d, 2 * f))
        self.gate_up_bias_EG = nn.Parameter(torch.empty(e, 2 * f))
        self.down_EFD = nn.Parameter(torch.empty(e, f, d))
        self.down_bias_ED = nn.Parameter(torch.empty(e, d))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Run tokens sorted by expert, [rows, dim], through their experts."""
        gate_up, gate_up_bias, down, down_bias = (local(getattr(self, name), x_RD.dtype) for name in _PARAMETERS)
        offsets = host_value_cache.ends(num_tokens_per_expert_E)

        def of_rows(bias: torch.Tensor) -> torch.Tensor:
            return torch.repeat_interleave(bias, num_tokens_per_expert_E.long(), dim=0, output_size=x_RD.shape[0])

        hidden = self._grouped_mm(A=x_RD, B_t=gate_up, offs=offsets) + of_rows(gate_up_bias)
        gate = hidden[..., ::2].clamp(max=self.limit)
        up = hidden[..., 1::2].clamp(min=-self.limit, max=self.limit)
        hidden = gate * torch.sigmoid(gate * self.alpha) * (up + 1)
        return self._grouped_mm(A=hidden, B_t=down, offs=offsets) + of_rows(down_bias)


class GptOssDecoder(GptOssModel):
    """torchtitan's model, with our experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssModel.Config):
        """As GptOssModel's, but its experts have other parameters."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Fill in how modules are sharded."""
            GptOssModel.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                spread(layer.moe, *_PARAMETERS)


class GptOssAdapter(TableAdapter):
    """Names of GPT-OSS checkpoints in bfloat16 or float32."""

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
                ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"), _PARAMETERS, strict=True
            )
        },
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
    }


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """Make the torchtitan spec of a GPT-OSS config. Raises ValueError for features that are not implemented.

    `attention` changes nothing: only flex attention can train sinks.
    """
    refuse(
        hf,
        attention_bias="" if hf.attention_bias else "false",
        activation="" if hf.hidden_act == "silu" else hf.hidden_act,
    )
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
    return ModelSpec(
        name="gpt_oss",
        flavor=hf.model_type,
        model=GptOssDecoder.Config(**ends(hf), layers=layers),
        parallelize_fn=parallelize_gptoss,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=GptOssAdapter,
    )


def _rope(hf: Any, seq_len: int) -> CosSinRoPE.Config:
    given = dict(hf.rope_parameters)
    kind = given.pop("rope_type")
    rope = CosSinRoPE.Config(dim=hf.head_dim, max_seq_len=seq_len, theta=given.pop("rope_theta"))
    if kind == "default":
        return rope
    known = {"factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"}
    more = sorted(name for name, value in given.items() if value is not None and name not in known)
    refuse(hf, **{"RoPE scaling": "" if kind == "yarn" else kind, "RoPE option": ", ".join(more)})
    return replace(
        rope,
        scaling="yarn",
        rope_factor=given["factor"],
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        truncate=given.get("truncate", True),
        original_seq_len=given.get("original_max_position_embeddings") or hf.max_position_embeddings,
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
        # Sinks scale outputs by the log-sum-exp of the scores. Varlen kernels return it, but drop its gradient.
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
        param_init=dict.fromkeys(_PARAMETERS, nn.init.zeros_),
    )
    return make_moe_config(
        num_experts=hf.num_local_experts,
        load_balance_coeff=None,
        router=make_router_config(
            dim=hf.hidden_size,
            num_experts=hf.num_local_experts,
            gate_param_init=MATRIX,
            top_k=hf.num_experts_per_tok,
            score_func="softmax",
            route_norm=True,
            bias=True,
        ),
        routed_experts=routed(experts, hf.num_experts_per_tok),
    )

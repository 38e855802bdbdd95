"""A decoder with grouped-query attention, in the variants that families have of it.

Beyond the usual: attention may be gated, see only a window, normalise queries and keys by head or over all heads, or
go without rotary embeddings; a block may normalise what its two halves put out as well as what they take in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import (
    BaseAttention,
    QKVLinear,
    VarlenAttention,
    create_varlen_metadata_for_document,
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
    get_sliding_window_mask_mod,
)
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.nn.adapters.table import TableAdapter
from primeslurm.nn.layers import vision
from primeslurm.nn.layers.common import ends, linear
from primeslurm.nn.layers.rotary import Rotary

_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}
_EXPERTS_LAYOUT = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


class Attention(BaseAttention):
    """Grouped-query attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        """What the attention is made of; what is None, it does not have."""

        n_kv_heads: int
        head_dim: int
        qkv_linear: QKVLinear.Config
        wo: Linear.Config
        q_norm: RMSNorm.Config | None = None
        """Over one head, or over all of them if it is as wide."""
        k_norm: RMSNorm.Config | None = None
        rope: Rotary.Config | None = None
        window: int | None = None
        """How many tokens a token sees, itself included; None for all before it."""
        gate: Linear.Config | None = None
        """Scales the output, by head or by value."""
        gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.qkv_linear = config.qkv_linear.build()
        self.wo = config.wo.build()
        self.inner_attention = config.inner_attention.build()
        self.q_norm = config.q_norm.build() if config.q_norm else None
        self.k_norm = config.k_norm.build() if config.k_norm else None
        self.rope = config.rope.build() if config.rope else None
        self.gate = config.gate.build() if config.gate else None

    def forward(self, x: torch.Tensor, masks: Any, positions: torch.Tensor) -> torch.Tensor:
        """Map hidden states [batch, length, dim] to the same shape. `masks` come from get_attention_masks."""
        config = self.config
        query, key, value = self.qkv_linear(x)
        query, key = _normalised(self.q_norm, query), _normalised(self.k_norm, key)
        if self.rope is not None:
            query, key = self.rope(query, key, positions)
        out = self.inner_attention(
            query,
            key,
            value,
            attention_masks=masks[config.window] if isinstance(masks, Mapping) else masks,
            scale=config.head_dim**-0.5,
            enable_gqa=config.n_heads > config.n_kv_heads,
        )
        if self.gate is not None:
            gate = _GATES[config.gate_activation](self.gate(x).float()).to(out.dtype)
            out = out * gate.unflatten(-1, (config.n_heads, -1))
        return self.wo(out.flatten(2))


def _normalised(norm: Any, heads: torch.Tensor) -> torch.Tensor:
    if norm is None:
        return heads
    if norm.normalized_shape[0] == heads.shape[-1]:
        return norm(heads)
    return norm(heads.flatten(2)).unflatten(2, heads.shape[2:])


class GqaBlock(TransformerBlock):
    """Attention and a feed-forward network or mixture of experts, each added to the hidden states."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        """TransformerBlock's, and norms of what attention and feed-forward network put out, if there are any."""

        post_attention_norm: RMSNorm.Config | None = None
        post_ffn_norm: RMSNorm.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.moe_enabled = config.moe is not None
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.ffn_norm = config.ffn_norm.build()
        if config.moe is not None:
            self.moe = config.moe.build()
        elif config.feed_forward is not None:
            self.feed_forward = config.feed_forward.build()
        self.post_attention_norm = config.post_attention_norm.build() if config.post_attention_norm else None
        self.post_ffn_norm = config.post_ffn_norm.build() if config.post_ffn_norm else None

    def forward(self, x: torch.Tensor, masks: Any, positions: torch.Tensor) -> torch.Tensor:
        """Map hidden states [batch, length, dim] to hidden states."""
        h = self.attention(self.attention_norm(x), masks, positions)
        x = x + (h if self.post_attention_norm is None else self.post_attention_norm(h))
        h = (self.moe if self.moe_enabled else self.feed_forward)(self.ffn_norm(x))
        return x + (h if self.post_ffn_norm is None else self.post_ffn_norm(h))


class GqaDecoder(vision.Decoder):
    """Embedding, blocks, norm and head. Not made for tensor parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(vision.Decoder.Config):
        """As vision.Decoder's."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Prepare the experts for the parallelism of `config`."""
            vision.Decoder.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                if layer.moe is not None:
                    set_moe_sharding_config(
                        layer.moe,
                        enable_ep=config.parallelism.expert_parallel_degree > 1,
                        enable_sp=config.parallelism.enable_sequence_parallel,
                        expert_param_layout=_EXPERTS_LAYOUT,
                    )

    def get_attention_masks(self, positions: torch.Tensor) -> Any:
        """What attention needs to know of packed rows, [rows, length]; for flex attention, a mask for each window."""
        attention = self.config.first_attention
        if isinstance(attention.inner_attention, VarlenAttention.Config):
            return create_varlen_metadata_for_document(positions)
        documents = [get_causal_mask_mod(), get_efficient_causal_mask_mod_for_packed_document(positions)]
        return {
            window: self._create_flex_attention_mask(
                positions, attention, [*documents, get_sliding_window_mask_mod(window)] if window else documents
            )
            for window in {layer.attention.window: None for layer in self.config.layers}
        }


def attention(
    hf: Any,
    backend: str,
    *,
    heads: int | None = None,
    window: int | None = None,
    bias: bool = False,
    output_bias: bool = False,
    **rest: Any,
) -> Attention.Config:
    """Make the config of an attention layer.

    Args:
        hf: the model's config in transformers.
        backend: "flex" or "varlen".
        heads: of queries, where layers differ.
        window: how many tokens a token sees, itself included; None for all before it.
        bias: whether projections of queries, keys and values have one.
        output_bias: whether the projection of outputs has one.
        rest: further fields of `Attention.Config`.
    """
    heads, size = heads or hf.num_attention_heads, hf.head_dim
    inner = get_attention_config(backend)
    if window and backend == "varlen":
        inner.window_size = (window - 1, 0)  # tokens before this one, and after
    return Attention.Config(
        n_heads=heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=size,
        # Unfused: a fused projection makes state_dict() a collective that keeps replicated copies of q, k and v.
        qkv_linear=QKVLinear.Config(
            head_dim=size,
            wq=linear(hf.hidden_size, heads * size, bias),
            wkv=linear(hf.hidden_size, hf.num_key_value_heads * size, bias),
        ),
        wo=linear(heads * size, hf.hidden_size, output_bias),
        inner_attention=inner,
        window=window,
        **rest,
    )


def model_spec(hf: Any, layers: Sequence[GqaBlock.Config], adapter: type[TableAdapter], **changes: Any) -> ModelSpec:
    """Make the spec of a model of these layers; `changes` replace what `ends` says of what is around them."""
    return ModelSpec(
        name="gqa",
        flavor=hf.model_type,
        model=GqaDecoder.Config(**ends(hf) | changes, layers=list(layers)),
        parallelize_fn=vision.parallelize,
        pipelining_fn=pipeline_llm,
        # Nothing moves the biases of routers: engines choose experts by the checkpoint's.
        post_optimizer_build_fn=None,
        state_dict_adapter=adapter,
    )

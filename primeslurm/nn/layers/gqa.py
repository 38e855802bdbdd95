"""A decoder with grouped-query attention, with the variations that families need in attention and norms."""

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

from primeslurm.nn.checkpoint_names import TableAdapter
from primeslurm.nn.layers import vision
from primeslurm.nn.layers.common import build_parts, embedding_and_head, linear, model_spec, norm
from primeslurm.nn.layers.prefix_tree import branch_keys, branch_mask
from primeslurm.nn.layers.rotary import Rotary

_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}
_EXPERTS_LAYOUT = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


class Attention(BaseAttention):
    """Grouped-query attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        n_kv_heads: int
        head_dim: int
        qkv_linear: QKVLinear.Config
        wo: Linear.Config
        q_norm: RMSNorm.Config | None = None  # over one head, or over all heads if it is as wide as they are
        k_norm: RMSNorm.Config | None = None
        rope: Rotary.Config | None = None
        window: int | None = None  # Sliding window [tokens], including the token itself. None: no window.
        gate: Linear.Config | None = None  # its output scales attention's output, per head or per value
        gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        build_parts(self, config, "qkv_linear", "wo", "inner_attention", "q_norm", "k_norm", "rope", "gate")

    def forward(self, x: torch.Tensor, masks: Any, positions: torch.Tensor) -> torch.Tensor:
        """Map hidden states [batch, length, dim] to the same shape. `masks` come from `get_attention_masks`."""
        config = self.config
        query, key, value = self.qkv_linear(x)
        query, key = _normalized(self.q_norm, query), _normalized(self.k_norm, key)
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


def _normalized(rms_norm: Any, heads: torch.Tensor) -> torch.Tensor:
    if rms_norm is None:
        return heads
    if rms_norm.normalized_shape[0] == heads.shape[-1]:
        return rms_norm(heads)
    return rms_norm(heads.flatten(2)).unflatten(2, heads.shape[2:])


class GqaBlock(TransformerBlock):
    """A decoder layer: grouped-query attention, then a feed-forward network or experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        post_attention_norm: RMSNorm.Config | None = None  # norm of attention's output
        post_ffn_norm: RMSNorm.Config | None = None  # norm of the output of the feed-forward network or experts

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.moe_enabled = config.moe is not None
        build_parts(self, config, "attention_norm", "attention", "ffn_norm")
        build_parts(self, config, "moe" if self.moe_enabled else "feed_forward")
        build_parts(self, config, "post_attention_norm", "post_ffn_norm")

    def forward(self, x: torch.Tensor, masks: Any, positions: torch.Tensor) -> torch.Tensor:
        h = self.attention(self.attention_norm(x), masks, positions)
        x = x + (h if self.post_attention_norm is None else self.post_attention_norm(h))
        h = (self.moe if self.moe_enabled else self.feed_forward)(self.ffn_norm(x))
        return x + (h if self.post_ffn_norm is None else self.post_ffn_norm(h))


class GqaDecoder(vision.Decoder):
    """A decoder of GqaBlocks between embedding, final norm and head. It does not support tensor parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(vision.Decoder.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            vision.Decoder.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                if layer.moe is not None:
                    set_moe_sharding_config(
                        layer.moe,
                        enable_ep=config.parallelism.expert_parallel_degree > 1,
                        enable_sp=config.parallelism.enable_sequence_parallel,
                        expert_param_layout=_EXPERTS_LAYOUT,
                    )

    def get_attention_masks(self, positions: torch.Tensor, branches: torch.Tensor | None = None) -> Any:
        """Return varlen metadata for packed rows [rows, length]; for flex attention, a mask by window.

        `branches` are those of `nn.layers.prefix_tree`. None: no documents share a prefix.
        """
        attention = self.config.first_attention
        if isinstance(attention.inner_attention, VarlenAttention.Config):
            documents = create_varlen_metadata_for_document
            return documents(positions) if branches is None else branch_keys(positions, branches)
        return {
            window: self._create_flex_attention_mask(positions, attention, _flex_rules(positions, branches, window))
            for window in {layer.attention.window: None for layer in self.config.layers}
        }


def _flex_rules(positions: torch.Tensor, branches: torch.Tensor | None, window: int | None) -> list[Any]:
    if branches is not None:
        return [branch_mask(positions, branches, window)]
    documents = [get_causal_mask_mod(), get_efficient_causal_mask_mod_for_packed_document(positions)]
    return [*documents, get_sliding_window_mask_mod(window)] if window else documents


def attention(
    hf: Any,
    backend: str,
    *,
    heads: int | None = None,
    window: int | None = None,
    bias: bool = False,
    output_bias: bool = False,
    **fields: Any,
) -> Attention.Config:
    """Return the config of an attention layer with backend "flex" or "varlen".

    `bias` applies to the projections of queries, keys and values. `fields` are further fields of `Attention.Config`.
    """
    heads, size = heads or hf.num_attention_heads, hf.head_dim
    inner = get_attention_config(backend)
    if window and backend == "varlen":
        inner.window_size = (window - 1, 0)  # tokens before and after this one
    return Attention.Config(
        n_heads=heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=size,
        # Not fused: with a fused projection, state_dict() is a collective that keeps replicated copies of q, k and v.
        qkv_linear=QKVLinear.Config(
            head_dim=size,
            wq=linear(hf.hidden_size, heads * size, bias),
            wkv=linear(hf.hidden_size, hf.num_key_value_heads * size, bias),
        ),
        wo=linear(heads * size, hf.hidden_size, output_bias),
        inner_attention=inner,
        window=window,
        **fields,
    )


def block(hf: Any, attention: Attention.Config, **fields: Any) -> GqaBlock.Config:
    """Return a block config with norms before both halves. `fields`: feed-forward or experts, and further norms."""
    before = {name: norm(hf, hf.hidden_size) for name in ("attention_norm", "ffn_norm")}
    return GqaBlock.Config(**before, attention=attention, **fields)


def decoder_spec(hf: Any, layers: Sequence[GqaBlock.Config], adapter: type[TableAdapter], **changes: Any) -> ModelSpec:
    """Return the spec of a decoder with these layers. `changes` override fields of `common.embedding_and_head`."""
    model = GqaDecoder.Config(**embedding_and_head(hf) | changes, layers=list(layers))
    return model_spec(hf, "gqa", model, adapter, vision.parallelize, pipeline_llm)

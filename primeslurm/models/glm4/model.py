"""GLM-4-9B-0414, GLM-4-32B-0414 and GLM-Z1: dense, with norms before and after both halves of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common import Linear
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from primeslurm.nn.checkpoint_names import DECODER, TableAdapter
from primeslurm.nn.layers import gqa
from primeslurm.nn.layers.common import build_parts, linear, norm, refuse_other_activations
from primeslurm.nn.layers.rotary import rotary

_HF, _OURS = "model.layers.{}.", "layers.{}."


class Glm4Adapter(TableAdapter):
    """State dict adapter between this model and GLM-4-0414 checkpoints."""

    names = {name: ours for name, ours in DECODER.items() if ".mlp." not in name} | {
        _HF + "post_self_attn_layernorm.weight": _OURS + "post_attention_norm.weight",
        _HF + "post_mlp_layernorm.weight": _OURS + "post_ffn_norm.weight",
        _HF + "mlp.gate_up_proj.weight": _OURS + "feed_forward.w13.weight",
        _HF + "mlp.down_proj.weight": _OURS + "feed_forward.w2.weight",
    }


class FusedFeedForward(Module):
    """SwiGLU with gate and up in one matrix, as checkpoints have it, so that ranks load it without conversion."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w13: Linear.Config
        """One matrix: rows of the gate projection, then rows of the up projection."""
        w2: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        build_parts(self, config, "w13", "w2")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    refuse_other_activations(hf)
    layers = [_layer(hf, attention) for _ in range(hf.num_hidden_layers)]
    return gqa.decoder_spec(hf, layers, Glm4Adapter)


def _layer(hf: Any, attention: str) -> gqa.GqaBlock.Config:
    width, hidden = hf.intermediate_size, hf.hidden_size
    return gqa.block(
        hf,
        gqa.attention(hf, attention, bias=hf.attention_bias, rope=rotary(hf, interleaved=True)),
        post_attention_norm=norm(hf, hidden),
        feed_forward=FusedFeedForward.Config(w13=linear(hidden, 2 * width), w2=linear(width, hidden)),
        post_ffn_norm=norm(hf, hidden),
    )

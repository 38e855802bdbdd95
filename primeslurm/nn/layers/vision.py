"""Decoders with a vision encoder, as in Qwen3-VL and Qwen3.5.

The encoder is transformers' own. Its features replace the embeddings of an image's placeholder tokens. Qwen3-VL also
adds features of earlier encoder layers to the hidden states after the first decoder layers (DeepStack, arXiv
2406.04334). A token of an image has three coordinates: time, height and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torchtitan.models.common.decoder as titan
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.protocols.module import Module
from transformers import AutoModel
from transformers.modeling_layers import GradientCheckpointingLayer

from primeslurm.nn import compat, one_rank


@dataclass(frozen=True)
class VisionInput:
    """Image patches of packed rows, and which tokens of the rows stand for them."""

    pixels: torch.Tensor  # [patches, values], all images one after the other
    grids: torch.Tensor  # [images, 3]: patches of each image in time, height and width
    features: torch.Tensor  # [rows, length]: index of the encoder's output that a token stands for; -1 for text
    coordinates: torch.Tensor  # [rows, length, 3]: time, height and width of a token; all equal for text

    def spread(self, outputs: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Put the encoder's outputs [image tokens, dim] into rows. Other tokens keep `text` [rows, length, dim]."""
        by_token = outputs.to(text.dtype)[self.features.clamp(min=0)]
        return torch.where((self.features >= 0).unsqueeze(-1), by_token, text)


class VisionEncoder(Module):
    """The vision encoder of a model, in transformers' implementation."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        hf: Any  # config of transformers
        frozen: bool = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        hf = config.hf
        self.encoder = AutoModel.from_config(hf).requires_grad_(not config.frozen)
        self.frozen = config.frozen
        self.merge = int(hf.spatial_merge_size)  # patches per token, in height and in width
        self.patch_values = int(hf.in_channels * hf.temporal_patch_size * hf.patch_size**2)

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the features of all images [tokens, dim], and those to add after the first decoder layers."""
        # A frozen encoder keeps no activations.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            out = self.encoder(pixels, grid_thw=grids, return_dict=True)
        return out.pooler_output, *(getattr(out, "deepstack_features", None) or ())

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        for parameter in self.encoder.parameters():
            parameter._is_hf_initialized = True  # makes transformers skip it
        self.encoder.init_weights()
        # Buffers only: the parameters may be in host memory.
        for module in self.encoder.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(buffer_device))


class Decoder(titan.Decoder):
    """torchtitan's decoder, which may have a vision encoder in front."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Decoder.Config):
        vision: VisionEncoder.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.vision: Any = config.vision.build() if config.vision else None

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention_masks: Any, images: VisionInput | None = None
    ) -> Any:
        """Return the head's output for tokens [rows, length].

        Layers get `positions` [rows, length]; with images [rows, length, 4]: the position, then time, height and width.
        """
        hidden = self.tok_embeddings(tokens)
        deep: list[torch.Tensor] = []
        if images is not None:
            first, *deep = self.vision(images.pixels, images.grids)
            hidden = images.spread(first, hidden)
            positions = torch.cat([positions.unsqueeze(-1), images.coordinates], dim=-1)
        for index, layer in enumerate(self.layers.values()):
            hidden = layer(hidden, attention_masks, positions)
            # DeepStack adds features to image tokens, and zeros to text.
            if images is not None and index < len(deep):
                hidden = hidden + images.spread(deep[index], hidden.new_zeros(()))
        return self.lm_head(self.norm(hidden))


def document_positions(positions: torch.Tensor) -> torch.Tensor:
    return positions if positions.ndim == 2 else positions[..., 0]


def parallelize(model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, ac_config: Any, **rest: Any) -> Any:
    """Shard the vision encoder block by block, and the decoder as torchtitan shards Qwen3."""
    if model.vision is not None:
        _shard(model, parallel_dims, training, parallelism.fsdp_reshard_after_forward != "never")
        if ac_config is not None and not model.vision.frozen:
            model.vision.encoder.gradient_checkpointing_enable({"use_reentrant": False})
    return parallelize_qwen3(
        model, parallel_dims=parallel_dims, training=training, parallelism=parallelism, ac_config=ac_config, **rest
    )


def _shard(model: Any, dims: Any, training: Any, reshard: bool) -> None:
    mesh = dims.get_mesh(["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"])
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    if one_rank.replaces_fsdp(model, mesh, dtype, training.enable_cpu_offload):
        return
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        "reshard_after_forward": reshard,
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=not compat.ON_CPU)
    for module in model.vision.encoder.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, **options)
    fully_shard(model.vision, **options)

"""Decoders that see: an encoder of images beside the language model, as Qwen3-VL and Qwen3.5 have it.

The encoder is transformers' own. What it makes of an image takes the place of the embeddings of the image's
placeholder tokens; Qwen3-VL also adds what earlier layers of the encoder made to the hidden states after the first
layers of the decoder (DeepStack, arXiv 2406.04334). A token of an image has three positions: time, height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
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

from primeslurm.nn import compat
from primeslurm.nn.adapters.table import TableAdapter


@dataclass(frozen=True)
class VisionInput:
    """The images of some packed rows, and where they are in them."""

    pixels: torch.Tensor
    """[patches, values], the patches of all images one after the other."""
    grids: torch.Tensor
    """[images, 3]: how many patches each image has in time, height and width."""
    features: torch.Tensor
    """[rows, length]: which of the encoder's outputs a token stands for; -1 for text."""
    coordinates: torch.Tensor
    """[rows, length, 3]: positions of a token in time, height and width; equal in text."""

    def spread(self, outputs: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Spread the encoder's outputs [tokens of images, dim] over rows; other tokens keep `text` [rows, len, dim]."""
        own = outputs.to(text.dtype)[self.features.clamp(min=0)]
        return torch.where((self.features >= 0).unsqueeze(-1), own, text)


class VisionEncoder(Module):
    """The encoder of images as transformers has it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """What is built, and whether it is trained."""

        hf: Any
        """A transformers config."""
        frozen: bool = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        hf = config.hf
        self.encoder = AutoModel.from_config(hf).requires_grad_(not config.frozen)
        self.frozen = config.frozen
        self.merge = int(hf.spatial_merge_size)
        """A token stands for so many patches in height, and as many in width."""
        self.patch_values = int(hf.in_channels * hf.temporal_patch_size * hf.patch_size**2)

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute features of all images, [tokens, dim], and those to be added after first layers of the decoder."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            out = self.encoder(pixels, grid_thw=grids, return_dict=True)
        return out.pooler_output, *(getattr(out, "deepstack_features", None) or ())

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        for parameter in self.encoder.parameters():
            parameter._is_hf_initialized = True  # by this, transformers leaves it alone
        self.encoder.init_weights()
        for module in self.encoder.modules():  # parameters may be in host memory
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(buffer_device))


class Decoder(titan.Decoder):
    """A decoder that may have a vision encoder."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Decoder.Config):
        """Decoder's of torchtitan, and the encoder, if there is one."""

        vision: VisionEncoder.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.vision: Any = config.vision.build() if config.vision else None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention_masks: Any,
        images: VisionInput | None = None,
    ) -> Any:
        """Map tokens [rows, length] to what the head makes of them.

        Layers get `positions` as they are given, [rows, length]; with images, those and the three coordinates of each
        token, [rows, length, 4].
        """
        hidden = self.tok_embeddings(tokens)
        deep: list[torch.Tensor] = []
        if images is not None:
            first, *deep = self.vision(images.pixels, images.grids)
            hidden = images.spread(first, hidden)
            positions = torch.cat([positions.unsqueeze(-1), images.coordinates], dim=-1)
        for index, layer in enumerate(self.layers.values()):
            hidden = layer(hidden, attention_masks, positions)
            if images is not None and index < len(deep):
                hidden = hidden + images.spread(deep[index], hidden.new_zeros(()))
        return self.lm_head(self.norm(hidden))


def document_positions(positions: torch.Tensor) -> torch.Tensor:
    """Return positions [rows, length] in documents, out of the positions that layers get."""
    return positions if positions.ndim == 2 else positions[..., 0]


def parallelize(model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, ac_config: Any, **rest: Any) -> Any:
    """Shard the encoder block by block, and the rest as torchtitan does."""
    if model.vision is not None:
        _shard(model.vision, parallel_dims, training, parallelism.fsdp_reshard_after_forward != "never")
        if ac_config is not None and not model.vision.frozen:
            model.vision.encoder.gradient_checkpointing_enable({"use_reentrant": False})
    return parallelize_qwen3(
        model, parallel_dims=parallel_dims, training=training, parallelism=parallelism, ac_config=ac_config, **rest
    )


def _shard(vision: VisionEncoder, dims: Any, training: Any, reshard: bool) -> None:
    options: dict[str, Any] = {
        "mesh": dims.get_mesh(["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        "reshard_after_forward": reshard,
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=not compat.ON_CPU)
    for block in _blocks(vision):
        fully_shard(block, **options)
    fully_shard(vision, **options)


def _blocks(vision: VisionEncoder) -> Iterator[Any]:
    return (module for module in vision.encoder.modules() if isinstance(module, GradientCheckpointingLayer))


class VisionAdapter(TableAdapter):
    """Names of checkpoints that hold an encoder beside the language model."""

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return our tensors under checkpoint names. Raises KeyError for one that the table does not have."""
        vision, rest = _divided(state_dict, _OURS)
        return super().to_hf(rest) | {_THEIRS + name: tensor for name, tensor in vision.items()}

    def from_hf(self, hf_state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what `to_hf` made, or a whole checkpoint, under our names. Raises KeyError for an unknown name."""
        vision, rest = _divided(hf_state_dict, _THEIRS)
        return super().from_hf(rest) | {_OURS + name: tensor for name, tensor in vision.items()}


_OURS, _THEIRS = "vision.encoder.", "model.visual."


def _divided(tensors: dict[str, torch.Tensor], prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Those whose names begin with `prefix`, without it, and the others."""
    inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return inside, {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}

"""Vision encoders of transformers' models, found by the names of attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from primeslurm.nn.layers.vision import VisionInput
from primeslurm.recipe.sections.trainer import Vlm

ENCODERS = ("visual", "vision_tower", "vision_model", "vision_encoder")
# Usual attribute names, on the model or on its attribute `model`
LANGUAGE_MODELS = ("language_model", "text_model")


@dataclass(frozen=True)
class VisionParts:
    """Vision encoder and language model of a model of transformers."""

    inner: Any
    """The whole model."""
    encoder: nn.Module
    language_model: nn.Module

    @classmethod
    def of(cls, inner: Any, settings: Vlm) -> VisionParts:
        """Find the parts by the names in the recipe, or by usual names. Raises ValueError if that is not possible."""
        encoder = _part(inner, "vision_encoder", settings.vision_encoder, ENCODERS)
        language_model = _part(inner, "language_model", settings.language_model, LANGUAGE_MODELS)
        if {id(module) for module in encoder.modules()} & {id(module) for module in language_model.modules()}:
            raise ValueError(f"model.vlm: of {inner.config.model_type}, one of the two attributes is part of the other")
        return cls(inner, encoder, language_model)

    def freeze(self, encoder: bool, others: bool) -> None:
        """Freeze the encoder, and everything else but the language model and its head (for example a projector)."""
        head = self.inner.get_output_embeddings()
        parts = {id(p) for part in (self.encoder, self.language_model, head) for p in part.parameters()}
        for parameter in self.inner.parameters():
            if others and id(parameter) not in parts:
                parameter.requires_grad_(False)
        if encoder:
            self.encoder.requires_grad_(False)


class PatchReader:
    """Embeds images for models that read them as Qwen2-VL does: patches with a grid, and three coordinates per token.

    Raises ValueError for other models.
    """

    def __init__(self, parts: VisionParts, frozen: bool) -> None:
        hf = parts.inner.config
        sizes, rope = hf.vision_config, getattr(hf.get_text_config(), "rope_parameters", None) or {}
        names = ("spatial_merge_size", "temporal_patch_size", "patch_size", "in_channels")
        missing = [name for name in names if not isinstance(getattr(sizes, name, None), int)]
        if missing or "mrope_section" not in rope or getattr(sizes, "deepstack_visual_indexes", None):
            why = f"vision_config lacks {', '.join(missing)}" if missing else "its decoder takes them in another way"
            raise ValueError(
                f"model.vlm: {hf.model_type} does not read images as patches with three coordinates: {why}; "
                "leave model.vlm out to train on text"
            )
        self._parts, self._frozen = parts, frozen
        self.merge = int(sizes.spatial_merge_size)
        """Patches per token, in height and in width."""
        self.patch_values = int(sizes.in_channels * sizes.temporal_patch_size * sizes.patch_size**2)

    def embedded(self, tokens: torch.Tensor, positions: torch.Tensor, images: VisionInput) -> dict[str, torch.Tensor]:
        text = self._parts.inner.get_input_embeddings()(tokens)
        # A frozen encoder keeps no activations.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            output = self._parts.inner.get_image_features(
                pixel_values=images.pixels, image_grid_thw=images.grids, return_dict=True
            ).pooler_output
        features = output if isinstance(output, torch.Tensor) else torch.cat(tuple(output))
        # The position in the packed row comes first, then time, height and width.
        coordinates = torch.cat([positions[None], images.coordinates.permute(2, 0, 1)])
        return {"inputs_embeds": images.spread(features, text), "position_ids": coordinates}


def _part(inner: Any, field: str, name: str | None, usual: tuple[str, ...]) -> nn.Module:
    children = {path: module for path, module in _children(inner) if path}
    if name is not None and name in children:
        return children[name]
    paths = [path for path in children if name is None and path.rpartition(".")[2] in usual]
    if len(paths) == 1:
        return children[paths[0]]
    problem = f"no attribute {name!r}" if name is not None else f"{len(paths) or 'no'} attributes with a usual name"
    raise ValueError(f"model.vlm.{field}: {inner.config.model_type} has {problem}; it has {', '.join(children)}")


def _children(inner: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules of a model and of its attribute `model`, with their paths."""
    for name, module in inner.named_children():
        yield name, module
        if name == "model":
            yield from ((f"{name}.{below}", child) for below, child in module.named_children())

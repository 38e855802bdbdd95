"""Encoders of images in models of transformers that have no family of their own: by the names of their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from primeslurm.nn.layers.vision import VisionInput
from primeslurm.recipe.sections.trainer import Vlm

ENCODERS = ("visual", "vision_tower", "vision_model", "vision_encoder")
LANGUAGE_MODELS = ("language_model", "text_model")
"""What transformers calls them, below the model or below what it calls `model`."""


@dataclass(frozen=True)
class VisionParts:
    """The two parts of a model that sees images, as it has them."""

    inner: Any
    """The model of transformers."""
    encoder: nn.Module
    language_model: nn.Module

    @classmethod
    def of(cls, inner: Any, settings: Vlm) -> VisionParts:
        """Find the parts by the recipe's names, or by usual ones.

        Raises:
            ValueError: there is no such attribute, or not one with a usual name, or one is part of the other.
        """
        encoder = _part(inner, "vision_encoder", settings.vision_encoder, ENCODERS)
        language_model = _part(inner, "language_model", settings.language_model, LANGUAGE_MODELS)
        if {id(module) for module in encoder.modules()} & {id(module) for module in language_model.modules()}:
            raise ValueError(f"model.vlm: of {inner.config.model_type}, one of the two attributes is part of the other")
        return cls(inner, encoder, language_model)

    def freeze(self, encoder: bool, beside: bool) -> None:
        """Take gradients from the encoder, and from all that is neither it, nor the language model, nor a head."""
        head = self.inner.get_output_embeddings()
        known = {id(p) for part in (self.encoder, self.language_model, head) for p in part.parameters()}
        for parameter in self.inner.parameters():
            if beside and id(parameter) not in known:
                parameter.requires_grad_(False)
        if encoder:
            self.encoder.requires_grad_(False)


class PatchReader:
    """How a model of transformers reads images: as Qwen2-VL does, by patches with a grid and by three coordinates.

    Raises:
        ValueError: it reads them in another way.
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
        """A token stands for so many patches in height, and as many in width."""
        self.patch_values = int(sizes.in_channels * sizes.temporal_patch_size * sizes.patch_size**2)

    def embedded(self, tokens: torch.Tensor, positions: torch.Tensor, images: VisionInput) -> dict[str, torch.Tensor]:
        """Make of tokens and positions [rows, length] what the model takes in their place."""
        text = self._parts.inner.get_input_embeddings()(tokens)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            found = self._parts.inner.get_image_features(
                pixel_values=images.pixels, image_grid_thw=images.grids, return_dict=True
            ).pooler_output
        features = found if isinstance(found, torch.Tensor) else torch.cat(tuple(found))
        coordinates = torch.cat(
            [positions[None], images.coordinates.permute(2, 0, 1)]
        )  # of text first, as it is packed
        return {"inputs_embeds": images.spread(features, text), "position_ids": coordinates}


def _part(inner: Any, field: str, name: str | None, usual: tuple[str, ...]) -> nn.Module:
    children = {path: module for path, module in _children(inner) if path}
    if name is not None and name in children:
        return children[name]
    found = [path for path in children if name is None and path.rpartition(".")[2] in usual]
    if len(found) == 1:
        return children[found[0]]
    asked = f"no attribute {name!r}" if name is not None else f"{len(found) or 'no'} attributes with a usual name"
    raise ValueError(f"model.vlm.{field}: {inner.config.model_type} has {asked}; it has {', '.join(children)}")


def _children(inner: Any) -> Iterator[tuple[str, nn.Module]]:
    """Attributes of a model, and those of what it calls `model`."""
    for name, module in inner.named_children():
        yield name, module
        if name == "model":
            yield from ((f"{name}.{below}", child) for below, child in module.named_children())

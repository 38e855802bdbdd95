"""Rotary position embeddings of any kind whose frequencies do not depend on the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common import CosSinRoPE
from torchtitan.protocols.module import Module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from primeslurm.nn.layers.common import refuse

KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds of scaling whose frequencies are the same for every length."""


class Rotary(Module):
    """Rotates the first `2 * len(inverse_frequencies)` values of every head: of its two halves, or neighbours.

    What it returns is in the rotate-half order, whichever pairs were rotated: attention's scores are the same.

    Angles are computed from the positions: a table for every position would cost each layer 134 MB at 131072
    positions and heads of 128.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Frequencies, one for each pair of dimensions, and what is done with them."""

        inverse_frequencies: tuple[float, ...]
        scale: float = 1.0
        """Factor of sine and cosine (YaRN's attention factor)."""
        axes: tuple[int, ...] = ()
        """Which position of an image's tokens turns each of these frequencies: 0 time, 1 height, 2 width."""
        interleaved: bool = False
        """A pair is two neighbours, not one value of each half."""

    inverse_frequencies: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inverse_frequencies", torch.tensor(config.inverse_frequencies), persistent=False)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, [batch, length, heads, head_dim], by positions.

        These are [batch, length], or with images [batch, length, 4], as `vision.Decoder` has them.
        """
        own = positions.unsqueeze(-1) if positions.ndim == 2 else positions[..., 1:][..., self.config.axes]
        angles = own.unsqueeze(-2).float() * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * self.config.scale
        size = angles.shape[-1]
        first = query[..., :size], key[..., :size]
        if self.config.interleaved:
            first = _by_halves(first[0]), _by_halves(first[1])
        rotated = CosSinRoPE.apply_rotary_emb(*first, table)
        return torch.cat([rotated[0], query[..., size:]], dim=-1), torch.cat([rotated[1], key[..., size:]], dim=-1)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        device = buffer_device or self.inverse_frequencies.device
        self.inverse_frequencies = torch.tensor(self.config.inverse_frequencies, device=device)


def _by_halves(heads: torch.Tensor) -> torch.Tensor:
    """Values at even places, then those at odd ones."""
    return heads.unflatten(-1, (-1, 2)).mT.flatten(-2)


def rotary(hf: Any, layer_type: str | None = None, *, interleaved: bool = False) -> Rotary.Config:
    """Make the rotary embedding of a config, or of one of its layer types where they differ.

    Args:
        hf: the model's config in transformers.
        layer_type: which of its layers.
        interleaved: whether neighbours are pairs.

    Raises:
        ValueError: the kind of scaling is not supported.
    """
    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    kind = parameters["rope_type"]
    refuse(hf, **{"RoPE scaling": "" if kind in KINDS else kind})
    rest: dict[str, Any] = {"axes": _axes(hf, parameters), "interleaved": interleaved}
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), layer_type=layer_type)
        return Rotary.Config(inverse_frequencies=tuple(frequencies.tolist()), scale=scale, **rest)
    size = int(hf.head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.float) / size
    frequencies = 1.0 / parameters["rope_theta"] ** exponents
    return Rotary.Config(inverse_frequencies=tuple(frequencies.tolist()), **rest)


def _axes(hf: Any, parameters: Any) -> tuple[int, ...]:
    """Frequencies take turns: time, height, width, time ... until those of height and width have theirs."""
    sections = parameters.get("mrope_section")
    if sections is None:
        return ()
    refuse(hf, **{"RoPE in sections": not parameters.get("mrope_interleaved", True)})
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * len(axes[axis : 3 * sections[axis] : 3])
    return tuple(axes)

"""Rotary position embeddings with every scaling whose frequencies do not depend on the length of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common import CosSinRoPE
from torchtitan.protocols.module import Module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from primeslurm.nn.layers.common import refuse

SCALINGS = ("default", "linear", "llama3", "yarn")


class Rotary(Module):
    """Rotates the first `2 * len(inverse_frequencies)` values of every head.

    The result is in the rotate-half order even if neighbors were rotated: attention scores are the same in any order.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inverse_frequencies: tuple[float, ...]  # one per pair of values
        scale: float = 1.0  # factor of sine and cosine (YaRN's attention factor)
        axes: tuple[int, ...] = ()
        """For each frequency, the coordinate of image tokens that it rotates by: 0 time, 1 height, 2 width."""
        interleaved: bool = False  # Pairs are neighbors. False: a pair is one value of each half.

    inverse_frequencies: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inverse_frequencies", torch.tensor(config.inverse_frequencies), persistent=False)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys [batch, length, heads, head_dim] by positions as in `vision.Decoder`."""
        # No table of angles: at 131072 positions and heads of 128 it would cost every layer 134 MB.
        by_axis = positions.unsqueeze(-1) if positions.ndim == 2 else positions[..., 1:][..., self.config.axes]
        angles = by_axis.unsqueeze(-2).float() * self.inverse_frequencies
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
    """Return the values at even indices, then those at odd ones."""
    return heads.unflatten(-1, (-1, 2)).mT.flatten(-2)


def rotary(hf: Any, layer_type: str | None = None, *, interleaved: bool = False) -> Rotary.Config:
    """Return the rotary embedding of a config of transformers, or of one of its layer types. Raises ValueError."""
    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    scaling = parameters["rope_type"]
    refuse(hf, **{"RoPE scaling": "" if scaling in SCALINGS else scaling})
    fields: dict[str, Any] = {"axes": _axes(hf, parameters), "interleaved": interleaved}
    if scaling != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[scaling](hf, torch.device("cpu"), layer_type=layer_type)
        return Rotary.Config(inverse_frequencies=tuple(frequencies.tolist()), scale=scale, **fields)
    # transformers has no function for the default scaling.
    size = int(hf.head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.float) / size
    frequencies = 1.0 / parameters["rope_theta"] ** exponents
    return Rotary.Config(inverse_frequencies=tuple(frequencies.tolist()), **fields)


def _axes(hf: Any, parameters: Any) -> tuple[int, ...]:
    """Return the axes of interleaved MRoPE: time, height, width, time, ... until height and width have theirs."""
    sections = parameters.get("mrope_section")
    if sections is None:
        return ()
    refuse(hf, **{"RoPE in sections": not parameters.get("mrope_interleaved", True)})
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * len(axes[axis : 3 * sections[axis] : 3])
    return tuple(axes)

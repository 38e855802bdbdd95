"""In which format tensors leave the trainer: in the model's dtype, or in block-scaled FP8 where engines compute in it.

FP8 is the format of Hugging Face's FP8 checkpoints: `weight` in e4m3 and `weight_scale_inv`, one float32 for each block
of 128 x 128. It takes half the bytes of bfloat16, and quantising it again in the same blocks changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from primeslurm.wire.weights import FP8_BLOCK, FP8_SCALE

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_TINIEST = 1e-12
"""Least scale: a block of zeros has one, too."""
_PROJECTIONS = ("_proj.weight", "_proj_with_mqa.weight")


@dataclass(frozen=True)
class Encoding:
    """What becomes of a tensor that leaves the trainer.

    Args:
        dtype: of all tensors, or with `fp8` of those that engines do not compute in FP8.
        fp8: projections and experts leave in FP8.
        stored: what engines' own checkpoint stores in FP8: exactly these weights leave in FP8, whatever `fp8` says.
    """

    dtype: torch.dtype
    fp8: bool = False
    stored: frozenset[str] = frozenset()

    @property
    def dtype_name(self) -> str:
        """`dtype` as config.json names it."""
        return str(self.dtype).removeprefix("torch.")

    def encode(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """A tensor as what leaves the trainer, by name."""
        if not self._in_fp8(name, tensor):
            return {name: tensor}
        weight, scales = quantize(tensor)
        return {name: weight, name + FP8_SCALE: scales}

    def quantization(self, names: set[str]) -> dict[str, Any] | None:
        """config.json's `quantization_config` of a model with tensors `names`, if there is one."""
        if not (self.fp8 or self.stored):
            return None
        weights = {name for name in names if name.endswith(".weight")}
        kept = sorted(name.removesuffix(".weight") for name in weights if name + FP8_SCALE not in names)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": kept,
        }

    def _in_fp8(self, name: str, tensor: torch.Tensor) -> bool:
        if self.stored:
            return name in self.stored
        matrix = tensor.ndim == 2 and name.endswith(".weight")
        return self.fp8 and matrix and (name.endswith(_PROJECTIONS) or ".experts." in name)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in e4m3, and the float32 scale of each block by which it has to be multiplied."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    scales = (blocks.abs().amax(dim=(1, 3)) / _LARGEST).clamp(min=_TINIEST)
    scaled = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return scaled.to(_FP8), scales

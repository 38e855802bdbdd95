"""Which weights are in FP8, and in which format tensors leave the trainer.

FP8 is the format of Hugging Face's FP8 checkpoints: `weight` in e4m3 and `weight_scale_inv`, one float32 for each block
of 128 x 128. It takes half the bytes of bfloat16, and quantising it again in the same blocks changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from primeslurm.recipe import Recipe
from primeslurm.trainer.kernels.block_fp8 import BLOCK, BLOCKS, quantise
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

_PRODUCTS = re.compile(
    r"(^|\.)(?!eh_proj|weights_proj)"
    r"(experts\..*|\w+_proj|kv_a_proj_with_mqa|in_proj_qkv|in_proj_z|indexer\.wq_b)\.weight$"
)

_EXACT = ("expert_bias_E", "expert_bias", "e_score_correction_bias")
"""Keep their dtype: rounding a router's selection bias would change which experts it selects."""


def in_fp8(name: str) -> bool:
    """Whether a weight of this name in a checkpoint is an operand of FP8 products, where anything is.

    Projections and experts are. What stays in full precision is small or sensitive, and engines keep it so, too:
    embeddings, head and norms; routers and the gate of shared experts; of Mamba and delta nets the convolution, decay
    and step sizes; of sparse attention's indexer all but its queries; what drafts further tokens; what sees images.
    """
    return _PRODUCTS.search(name) is not None


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the dtype in which it leaves the trainer."""
    return tensor if name.endswith(_EXACT) else tensor.to(dtype)


@dataclass(frozen=True)
class Encoding:
    """What becomes of a tensor that leaves the trainer.

    Args:
        dtype: of all tensors, or with `fp8` of those that engines do not compute in FP8.
        fp8: projections and experts leave in FP8.
        stored: what engines' own checkpoint stores in FP8: exactly these weights leave in FP8, whatever `fp8` says.
            They are quantised from float32, so that what did not change is what engines began with.
    """

    dtype: torch.dtype
    fp8: bool = False
    stored: frozenset[str] = frozenset()

    @property
    def dtype_name(self) -> str:
        """`dtype` as config.json names it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def gathered(self) -> torch.dtype:
        """What tensors have to be in before they are encoded."""
        return torch.float32 if self.stored else self.dtype

    def encode(self, name: str, tensor: torch.Tensor, experts: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        """Encode a tensor, or a stack of experts under a name with `{}` for their number, as it leaves the trainer."""
        # A layer's experts are in one format: engines hold them so.
        alone = (name.format(experts[0]), tensor[0]) if experts else (name, tensor)
        if not self._in_fp8(*alone):
            return {name: cast(name, tensor, self.dtype)}
        quantised = quantise(tensor, BLOCKS)
        return {name: quantised.data, name + FP8_SCALE: quantised.scales}

    def quantization(self, names: set[str]) -> dict[str, Any] | None:
        """Return config.json's `quantization_config` of a model with tensors `names`, if there is one."""
        if not (self.fp8 or self.stored):
            return None
        weights = {name for name in names if name.endswith(".weight")}
        kept = sorted(name.removesuffix(".weight") for name in weights if name + FP8_SCALE not in names)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }

    def _in_fp8(self, name: str, tensor: torch.Tensor) -> bool:
        if self.stored:
            return name in self.stored
        return self.fp8 and tensor.ndim == 2 and in_fp8(name)


def published(recipe: Recipe, stored: frozenset[str]) -> Encoding:
    """Say what becomes of the policies of a run whose model is stored in FP8 as far as `stored` says.

    Engines get what they compute in; what SFT has made is not quantised.
    """
    dtype = getattr(torch, recipe.model.dtype)
    if recipe.task == "sft":
        return Encoding(dtype)
    return Encoding(dtype, recipe.inference.quantization == "fp8", stored)

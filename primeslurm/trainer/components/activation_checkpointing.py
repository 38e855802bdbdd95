"""What layers keep for the backward pass, and what they compute anew: `activation_checkpointing` of the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC

from primeslurm.nn.layers import sparse_attention


class MatrixProductsAC(SelectiveAC):
    """torchtitan's selective checkpointing, but products of batches of matrices are not kept.

    In our models these are pairs of positions inside the parts of recurrent layers, which are computed anew anyway, and
    queries that latent attention has absorbed its up-projection into: larger than all else that their layers keep. Keys
    that sparse attention selects are kept.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """As SelectiveAC's."""

    def get_save_ops(self) -> set[Any]:
        """Operations whose results are kept."""
        return set(super().get_save_ops()) - {torch.ops.aten.bmm.default} | {sparse_attention.SELECTING}


class ChosenExpertsAC(SelectiveAC):
    """Keeps of a layer its input, and which experts its tokens chose.

    A compiled layer does not round alike in its forward pass and where it is computed anew, so a token may then choose
    other experts. Tokens by expert are counted once, in the forward pass: there would be one too many.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """As SelectiveAC's."""

    def get_save_ops(self) -> set[Any]:
        """Operations whose results are kept."""
        return {torch.ops.aten.topk.default}


POLICIES: dict[str, ActivationCheckpointing.Config | None] = {
    "none": None,
    "selective": MatrixProductsAC.Config(),
    "full": FullAC.Config(),
}
"""Of layers that are not compiled, by its name in recipes, torchtitan's setting; None for nothing."""


def policy(name: str, compiled: bool) -> ActivationCheckpointing.Config | None:
    """Return torchtitan's setting for what recipes call `name`; None for nothing.

    Args:
        name: `activation_checkpointing` of a recipe.
        compiled: whole layers are compiled, and not parts of them.
    """
    return ChosenExpertsAC.Config() if compiled and name == "full" else POLICIES[name]

"""Activation checkpointing: which tensors layers save for the backward pass. They recompute all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC

from primeslurm.nn.layers import sparse_attention


class MatrixProductsAC(SelectiveAC):
    """torchtitan's selective checkpointing, but it recomputes `bmm` and saves the selection of sparse attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's config, unchanged. It builds this class."""

    def get_save_ops(self) -> set[Any]:
        # Our models use bmm inside the chunks of recurrent layers, which are recomputed anyway, and for absorbed
        # queries of latent attention, which are larger than everything else that the layer saves.
        return set(super().get_save_ops()) - {torch.ops.aten.bmm.default} | {sparse_attention.SELECTING}


class ChosenExpertsAC(SelectiveAC):
    """Checkpointing of whole compiled layers that saves a layer's input and its top-k results (the chosen experts)."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's config, unchanged. It builds this class."""

    def get_save_ops(self) -> set[Any]:
        # A compiled layer rounds differently in the forward pass and in the recomputation, so the router could choose
        # other experts there. The counts of tokens per expert are those of the forward pass and would not match.
        return {torch.ops.aten.topk.default}


# Name in recipes to torchtitan's config, for layers that are not compiled
POLICIES: dict[str, ActivationCheckpointing.Config | None] = {
    "none": None,
    "selective": MatrixProductsAC.Config(),
    "full": FullAC.Config(),
}


def policy(name: str, compiled: bool) -> ActivationCheckpointing.Config | None:
    """Return torchtitan's config for a recipe's `activation_checkpointing`. None means no checkpointing."""
    return ChosenExpertsAC.Config() if compiled and name == "full" else POLICIES[name]

"""The changes to a torchtitan model before it is sharded, one converter per feature, in order.

A converter changes a `ModelDraft` if the recipe enables its feature, and raises ValueError if the model lacks support.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from primeslurm.nn import compat
from primeslurm.trainer.base.model_draft import ModelDraft
from primeslurm.trainer.components import draft_layer, logprobs, lora, matrix_products, router_replay, varlen_attention
from primeslurm.trainer.distributed import deepep, token_permutation


def replace_modules(draft: ModelDraft) -> None:
    compat.replace_modules(draft.config)


def freeze_vision_encoder(draft: ModelDraft) -> None:
    """Freeze or train the vision encoder as `model.vlm` says. Raise ValueError if the model has no encoder."""
    settings = draft.recipe.model.vlm
    if settings is None:
        return
    vision = getattr(draft.config, "vision", None)
    if vision is None:
        raise ValueError("model.vlm: the model has no vision encoder")
    vision.frozen = settings.freeze_vision_encoder


def fit(draft: ModelDraft) -> None:
    """Apply the recipe's parallelism and training settings to the model's config, as torchtitan's trainer does."""
    draft.config.update_from_config(config=draft.settings)


def build(draft: ModelDraft) -> None:
    draft.adapter = draft.spec.state_dict_adapter(draft.config, None)
    with torch.device("meta"):
        draft.model = draft.config.build()


# All converters, in the order in which they run
CONVERTERS: tuple[Callable[[ModelDraft], None], ...] = (
    # Changes of the config. They replace different modules, so their order matters only where a comment says so.
    replace_modules,
    varlen_attention.convert,
    deepep.convert,
    token_permutation.convert,  # after deepep: it replaces the dispatchers that deepep has left
    logprobs.convert,
    router_replay.convert,
    freeze_vision_encoder,
    fit,  # configures the token dispatchers: after both
    build,
    # Changes of the built model.
    draft_layer.convert,  # names the layer: before all that look at names
    deepep.split_into_chunks,
    matrix_products.convert,  # finds projections by torchtitan's classes: before LoRA replaces the classes
    lora.convert,  # freezes everything but adapters: after all converters that add parameters
)

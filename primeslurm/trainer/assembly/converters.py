"""Everything that is done to a model of torchtitan's before it is sharded, feature by feature.

A converter changes a `ModelDraft` if its recipe asks for the feature. Raises ValueError if the model cannot have it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from primeslurm.nn import compat
from primeslurm.trainer.base.model_draft import ModelDraft
from primeslurm.trainer.components import fp8, logprobs, lora, per_expert_products, router_replay, varlen_attention
from primeslurm.trainer.distributed import deepep, token_permutation


def replace_modules(draft: ModelDraft) -> None:
    """Replace the modules of torchtitan that do not work on this machine or in this dtype."""
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
    """Tell the config how the model will be split, as torchtitan's own trainer does."""
    draft.config.update_from_config(config=draft.settings)


def build(draft: ModelDraft) -> None:
    """Build the model of its config, on the meta device."""
    draft.adapter = draft.spec.state_dict_adapter(draft.config, None)
    with torch.device("meta"):
        draft.model = draft.config.build()


CONVERTERS: tuple[Callable[[ModelDraft], None], ...] = (
    # The config. Each of these replaces modules of torchtitan's that no other one looks for.
    replace_modules,
    varlen_attention.convert,
    deepep.convert,
    token_permutation.convert,  # after deepep has said which
    logprobs.convert,
    router_replay.convert,
    freeze_vision_encoder,
    fit,  # sets up token dispatchers: after deepep has said which
    build,
    # The model.
    deepep.split_into_chunks,
    per_expert_products.convert,
    fp8.convert,  # knows projections by torchtitan's own classes: before adapters change these
    lora.convert,  # freezes whatever is no adapter: after all that may add parameters
)
"""In the order in which they are applied."""

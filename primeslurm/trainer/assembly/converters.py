"""Everything that is done to a model of torchtitan's before it is sharded, feature by feature.

A converter changes a `ModelDraft` if its recipe asks for the feature. Raises ValueError if the model cannot have it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from primeslurm.nn import compat
from primeslurm.nn.layers import vision
from primeslurm.trainer.assembly.draft import ModelDraft
from primeslurm.trainer.components import fp8, logprobs, lora, router_replay, single_products, varlen_attention
from primeslurm.trainer.distributed import deepep, token_order


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
    compat.convert,
    varlen_attention.convert,
    deepep.convert,
    token_order.convert,  # after deepep has said which
    logprobs.convert,
    router_replay.convert,
    vision.convert,
    fit,  # sets up token dispatchers: after deepep has said which
    build,
    # The model.
    deepep.cut,
    single_products.convert,
    fp8.convert,  # knows projections by torchtitan's own classes: before adapters change these
    lora.convert,  # freezes whatever is no adapter: after all that may add parameters
)
"""In the order in which they are applied."""

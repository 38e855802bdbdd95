"""A model of torchtitan's before it is sharded: what converters work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from primeslurm.recipe import Recipe


@dataclass
class ModelDraft:
    """What becomes a model, and what is known of it meanwhile.

    Args:
        recipe: what the model is for.
        spec: torchtitan's `ModelSpec`.
        settings: torchtitan's `parallelism` and `training`.
        stored_fp8: names of the weights that the source stores in FP8.
        model: on the meta device, once it is built.
        adapter: from its state dict to Hugging Face names and back, once it is built.
    """

    recipe: Recipe
    spec: Any
    settings: Any = None
    stored_fp8: frozenset[str] = frozenset()
    model: Any = None
    adapter: Any = None

    @property
    def config(self) -> Any:
        """The model's config in torchtitan, which is changed in place before the model is built of it."""
        return self.spec.model

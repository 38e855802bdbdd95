"""A torchtitan model before it is sharded, as converters change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from primeslurm.recipe import Recipe


@dataclass
class ModelDraft:
    """A model's torchtitan config and, once it is built, its modules. Converters change both."""

    recipe: Recipe
    spec: Any
    """torchtitan's `ModelSpec`."""
    settings: Any = None
    """torchtitan's `parallelism` and `training` configs."""
    stored_fp8: frozenset[str] = frozenset()
    """Names of the weights that the source checkpoint stores in FP8."""
    draft_layer: int | None = None
    """Number of the draft layer (MTP) that the model consists of. None: the model is a whole policy."""
    model: Any = None
    """The model on the meta device, once it is built."""
    adapter: Any = None
    """The state dict adapter to Hugging Face's format, once the model is built."""

    @property
    def config(self) -> Any:
        """The model's torchtitan config. Converters change it in place before the model is built from it."""
        return self.spec.model

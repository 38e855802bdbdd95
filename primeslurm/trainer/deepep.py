"""DeepEP's kernels as the way in which tokens reach their experts, instead of torch's all-to-all."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher

from primeslurm.recipe import Recipe
from primeslurm.trainer import compat


def convert(model_config: Any, recipe: Recipe) -> None:
    """Use DeepEP in every layer of a model config, if the recipe asks for it.

    Raises:
        ValueError: a package that has what this needs is not installed.
    """
    layout = recipe.trainer.parallelism
    if layout.ep_backend != "deepep":
        return
    try:
        from deep_ep import ElasticBuffer  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "trainer.parallelism.ep_backend = deepep: the trainer needs the Python package deep_ep, 2.0 or newer "
            "(third_party/deepep builds it); without it, set ep_backend: torch"
        ) from error
    compat.swap(model_config, AllToAllTokenDispatcher, DeepEPTokenDispatcher)
    if layout.deepep_num_sms is not None:
        compat.set_deepep_sms(layout.deepep_num_sms)

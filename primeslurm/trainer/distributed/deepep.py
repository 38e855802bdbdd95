"""DeepEP's kernels as the way in which tokens reach their experts, instead of torch's all-to-all."""

from __future__ import annotations

from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher

from primeslurm.trainer import compat
from primeslurm.trainer.assembly.draft import ModelDraft


def convert(draft: ModelDraft) -> None:
    """Use DeepEP in every layer of a model, if the recipe asks for it.

    Raises:
        ValueError: a package that has what this needs is not installed.
    """
    layout = draft.recipe.trainer.parallelism
    if layout.ep_backend != "deepep":
        return
    try:
        from deep_ep import ElasticBuffer  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "trainer.parallelism.ep_backend = deepep: the trainer needs the Python package deep_ep, 2.0 or newer "
            "(third_party/deepep builds it); without it, set ep_backend: torch"
        ) from error
    compat.swap(draft.config, AllToAllTokenDispatcher, DeepEPTokenDispatcher)
    if layout.deepep_num_sms is not None:
        compat.set_deepep_sms(layout.deepep_num_sms)

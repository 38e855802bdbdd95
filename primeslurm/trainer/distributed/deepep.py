"""Dispatch of tokens to experts by DeepEP's kernels instead of torch's all-to-all."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher, EPDispatchMetadata

from primeslurm.nn import compat
from primeslurm.trainer.base.model_draft import ModelDraft


class DeepEPDispatcher(DeepEPTokenDispatcher):
    """torchtitan's DeepEP dispatcher, with fixes for new process groups, rows of unequal length and recomputation."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepEPTokenDispatcher.Config):
        """torchtitan's DeepEP config, plus the chunk size [tokens]."""

        chunk: int | None = None  # Maximum number of a rank's tokens per dispatch. None: all of them.

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        most = config.num_max_tokens_per_rank
        assert most is not None  # the base class requires it
        self.chunks = -(-most // config.chunk) if config.chunk else 1
        """Number of dispatches per layer, the same on all ranks, because every dispatch is a collective."""
        self.num_max_tokens_per_rank = -(-most // self.chunks)

    def init_buffer(self) -> None:
        # DeepEP uses the group's NCCL communicator, which torch creates with the first collective.
        assert self.ep_mesh is not None
        dist.all_reduce(torch.zeros(1, device=self.ep_mesh.device_type), group=self.ep_mesh.get_group())
        super().init_buffer()

    def dispatch(
        self, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor, counts_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, EPDispatchMetadata]:
        """Send tokens [tokens, dim] to the experts [tokens, top_k] that they chose."""
        from torchtitan.distributed.deepep.deepep import dispatch_tokens

        assert self.ep_mesh is not None
        compat.forget_deepep_handles()
        local_experts = self.num_experts // self.ep_mesh.size()
        # DeepEP numbers a token by rank * most + index, and compiles its kernels for `most`. So all ranks must pass the
        # same number, although their rows may have different lengths.
        most = self.num_max_tokens_per_rank
        routed_RD, counts_e, state = dispatch_tokens(
            x_TD, topk_expert_ids_TK, topk_scores_TK, local_experts, self.num_experts, num_tokens_per_rank=most
        )
        return routed_RD, counts_e, EPDispatchMetadata(state=state)


def convert(draft: ModelDraft) -> None:
    """Use DeepEP in every MoE layer if the recipe selects it. Raises ValueError if it cannot be used."""
    layout = draft.recipe.trainer.parallelism
    if layout.ep_backend != "deepep":
        return
    if draft.recipe.trainer.compile:
        raise ValueError("trainer.compile: DeepEP's operations cannot be traced; compile: false, or ep_backend: torch")
    try:
        from deep_ep import ElasticBuffer  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "trainer.parallelism.ep_backend = deepep: the trainer needs the Python package deep_ep, 2.0 or newer "
            "(third_party/deepep builds it); without it, set ep_backend: torch"
        ) from error
    compat.swap(draft.config, AllToAllTokenDispatcher, DeepEPDispatcher)
    for _, config, _, _ in draft.config.traverse(DeepEPDispatcher.Config):
        config.chunk = layout.deepep_token_chunk
    if layout.deepep_num_sms is not None:
        compat.set_deepep_sms(layout.deepep_num_sms)


def split_into_chunks(draft: ModelDraft) -> None:
    """Make the built model dispatch tokens in chunks, if the recipe sets a chunk size."""
    if draft.recipe.trainer.parallelism.deepep_token_chunk is None:
        return
    for module in draft.model.modules():
        if isinstance(module, RoutedExperts) and isinstance(module.token_dispatcher, DeepEPDispatcher):
            base: Any = type(module)
            module.__class__ = _in_chunks(base)


@functools.cache
def _in_chunks(base: Any) -> Any:
    class InChunks(base):
        def forward(
            self, x_BLD: torch.Tensor, scores_BLK: torch.Tensor, ids_BLK: torch.Tensor, counts_E: torch.Tensor
        ) -> torch.Tensor:
            count = self.token_dispatcher.chunks
            chunks = zip(*(t.flatten(0, 1).tensor_split(count) for t in (x_BLD, scores_BLK, ids_BLK)), strict=True)
            # counts_E counts all tokens, but DeepEP ignores it and counts the chunk's tokens itself.
            outputs = [super(InChunks, self).forward(*(part[None] for part in chunk), counts_E) for chunk in chunks]
            return torch.cat(outputs, 1).view(x_BLD.shape[0], -1, outputs[0].shape[-1])

    return InChunks

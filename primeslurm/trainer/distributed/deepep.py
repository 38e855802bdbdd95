"""DeepEP's kernels as the way in which tokens reach their experts, instead of torch's all-to-all."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher, EPDispatchMetadata

from primeslurm.nn import compat
from primeslurm.trainer.assembly.draft import ModelDraft


class DeepEPDispatcher(DeepEPTokenDispatcher):
    """torchtitan's, for ranks that have not met yet, rows of any length, and layers that are computed anew."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepEPTokenDispatcher.Config):
        """As DeepEPTokenDispatcher's, and how many tokens of a rank travel at once."""

        chunk: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        most = config.num_max_tokens_per_rank
        assert most is not None  # the base class insists on it
        self.pieces = -(-most // config.chunk) if config.chunk else 1
        """Into so many are the tokens of every rank cut, whatever their number, as all take part in each dispatch."""
        self.num_max_tokens_per_rank = -(-most // self.pieces)

    def init_buffer(self) -> None:
        """Make the buffer of this process, once its group has a communicator: DeepEP takes torch's, made or not."""
        assert self.ep_mesh is not None
        dist.all_reduce(torch.zeros(1, device=self.ep_mesh.device_type), group=self.ep_mesh.get_group())
        super().init_buffer()

    def dispatch(
        self, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor, counts_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, EPDispatchMetadata]:
        """As the base class, of tokens [tokens, dim] and the experts [tokens, top_k] that each chose.

        Ranks may have rows of different lengths. A token's number is its rank's times the most tokens that a rank has,
        which all must therefore say alike; DeepEP also compiles its kernels for that number.
        """
        from torchtitan.distributed.deepep.deepep import dispatch_tokens

        assert self.ep_mesh is not None
        compat.forget_deepep_handles()
        own = self.num_experts // self.ep_mesh.size()
        most = self.num_max_tokens_per_rank
        routed_RD, counts_e, state = dispatch_tokens(
            x_TD, topk_expert_ids_TK, topk_scores_TK, own, self.num_experts, num_tokens_per_rank=most
        )
        return routed_RD, counts_e, EPDispatchMetadata(state=state)


def convert(draft: ModelDraft) -> None:
    """Use DeepEP in every layer of a model, if the recipe asks for it.

    Raises:
        ValueError: a package that has what this needs is not installed, or layers are to be compiled.
    """
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


def cut(draft: ModelDraft) -> None:
    """Have tokens of every layer travel in pieces, if the recipe says how large. Call it once the model is built."""
    if draft.recipe.trainer.parallelism.deepep_token_chunk is None:
        return
    for module in draft.model.modules():
        if isinstance(module, RoutedExperts) and isinstance(module.token_dispatcher, DeepEPDispatcher):
            base: Any = type(module)
            module.__class__ = _in_pieces(base)


@functools.cache
def _in_pieces(base: Any) -> Any:
    """`base`, which is RoutedExperts or derived from it."""

    class InPieces(base):
        def forward(
            self, x_BLD: torch.Tensor, scores_BLK: torch.Tensor, ids_BLK: torch.Tensor, counts_E: torch.Tensor
        ) -> torch.Tensor:
            pieces = self.token_dispatcher.pieces
            parts = zip(*(t.flatten(0, 1).tensor_split(pieces) for t in (x_BLD, scores_BLK, ids_BLK)), strict=True)
            # counts are of all tokens; DeepEP makes its own
            made = [super(InPieces, self).forward(*(part[None] for part in piece), counts_E) for piece in parts]
            return torch.cat(made, 1).view(x_BLD.shape[0], -1, made[0].shape[-1])

    return InPieces

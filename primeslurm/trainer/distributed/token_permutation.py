"""Dispatch of tokens to experts that sends fewer rows than torchtitan's and needs no scatter-add.

torchtitan's dispatcher sends a copy of a token for each of its experts. Here a token is sent once to each rank that has
experts for it. The rank copies it for these experts, sums their outputs weighted by the scores, and sends back one row.
With 8 of 128 experts on two ranks, this sends a quarter of the rows, as few as DeepEP. Both directions of the
permutation are kept, so that forward and backward pass are gathers (`nn.kernels.rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed import GroupName
from torch.distributed.tensor import DeviceMesh
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalDispatchMetadata

from primeslurm.nn import compat
from primeslurm.nn.kernels import host_value_cache, rows
from primeslurm.nn.kernels.fp8.blocks import BLOCK
from primeslurm.trainer.base.model_draft import ModelDraft
from primeslurm.trainer.distributed.world import HostCopy


@dataclass(frozen=True)
class Copies:
    """Which of m rows each of n row copies belongs to. `nn.kernels.rows` explains `where` [m, slots], `owner` [n]."""

    where: torch.Tensor
    owner: torch.Tensor

    def first(self, count: int) -> Copies:
        """Drop all copies after the first `count`. The dropped ones must not belong to any row."""
        return Copies(self.where, self.owner[:count])

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        return rows.spread(tensor, self.where, self.owner)

    def gathered(self, tensor: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Sum the copies [n, dim] of each row, times weights [m, slots]. Returns [m, dim]."""
        return rows.gathered(tensor, self.where, self.owner, weights)


@dataclass(frozen=True)
class Route:
    """An all-to-all between the ranks of a group, with the numbers of rows to and from each rank, and its inverse."""

    group: GroupName
    send: list[int]
    receive: list[int]

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        return compat.all_to_all(tensor, self.group, self.receive, self.send)

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        return compat.all_to_all(tensor, self.group, self.send, self.receive)


@dataclass(frozen=True, kw_only=True)
class Metadata(LocalDispatchMetadata):
    """State of a dispatch that `combine` needs. `ranks` and `route` are set with expert parallelism only."""

    experts: Copies
    ranks: Copies | None = None
    route: Route | None = None


class OrderedDispatcher(AllToAllTokenDispatcher):
    """Token dispatcher that replaces torchtitan's all-to-all: it sends a token once per rank, not per expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """torchtitan's all-to-all config, plus the alignment of each expert's rows."""

        alignment: int = 1  # Each expert's rows are padded with zeros to a multiple of this. FP8 kernels need 128.

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._alignment = config.alignment

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        super().wire_meshes(ep_mesh=ep_mesh)
        if ep_mesh is not None:
            # Constants for compiled layers, which must not save a mesh for their backward pass.
            self._group, self._size, self._rank = (
                ep_mesh.get_group().group_name,
                ep_mesh.size(),
                ep_mesh.get_local_rank(),
            )

    def dispatch(
        self, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor, counts_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Metadata]:
        """Send tokens [tokens, dim] to the experts [tokens, top_k] that they chose.

        Returns rows [rows, dim] sorted by expert, the number of rows per local expert including padding, and the state.
        """
        if self.ep_mesh is None:
            counts_e = self._padded(counts_E)
            # Without padding, the number of rows is known. With padding, the host has to wait for the GPU.
            pairs = topk_expert_ids_TK.numel()
            numbers = None if self._alignment == 1 else _Numbers(counts_e)
            experts = self._copies(topk_expert_ids_TK, counts_E, counts_e)
            if numbers is not None:
                (), pairs = numbers.read()
            experts = experts.first(pairs)
            return experts.spread(x_TD), counts_e, self._metadata(topk_scores_TK, experts)
        size, experts_per_rank = self._size, self.num_experts // self._size
        rank_TK = topk_expert_ids_TK // experts_per_rank
        needed_TP = torch.zeros_like(rank_TK[:, :1], dtype=torch.bool).repeat(1, size).scatter_(1, rank_TK, True)
        with torch.no_grad():
            tallies = torch.cat([needed_TP.sum(0)[:, None], counts_E.view(size, experts_per_rank).long()], 1)
            received = compat.all_to_all(tallies, self._group)
            actual_e = received[:, 1:].sum(0)
            counts_e = self._padded(actual_e)
            numbers = _Numbers(counts_e, tallies[:, 0], received[:, 0])
        ranks = _by_rank(needed_TP)
        (send, receive), pairs = numbers.read()  # the only host synchronization of a dispatch
        ranks = ranks.first(sum(send))
        route = Route(self._group, send, receive)
        ids = route.there(ranks.spread(topk_expert_ids_TK))
        scores = route.there(ranks.spread(topk_scores_TK))
        # Experts of other ranks get the number after the last local one, so that they sort last and own no copy.
        is_local = ids // experts_per_rank == self._rank
        ids = torch.where(is_local, ids % experts_per_rank, experts_per_rank)
        experts = self._copies(ids, actual_e, counts_e).first(pairs)
        metadata = self._metadata(scores, experts, ranks, route)
        return experts.spread(route.there(ranks.spread(x_TD))), counts_e, metadata

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: LocalDispatchMetadata, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """Sum each token's expert outputs [rows, dim], weighted by scores, in float32: per rank, then over ranks."""
        assert isinstance(metadata, Metadata)
        summed = metadata.experts.gathered(routed_output_RD, metadata.topk_scores_experts_sorted_N)
        if metadata.ranks is not None and metadata.route is not None:
            summed = metadata.ranks.gathered(metadata.route.back(summed))
        return summed.to(x_TD.dtype)

    def _padded(self, counts: torch.Tensor) -> torch.Tensor:
        return counts if self._alignment == 1 else (counts + self._alignment - 1) // self._alignment * self._alignment

    def _copies(self, ids: torch.Tensor, actual: torch.Tensor, counts: torch.Tensor) -> Copies:
        padding = self._alignment - 1
        return _by_padded_expert(ids, actual, counts, padding) if padding else _by_expert(ids, len(counts))

    @staticmethod
    def _metadata(
        scores: torch.Tensor, experts: Copies, ranks: Copies | None = None, route: Route | None = None
    ) -> Metadata:
        return Metadata(
            token_indices_experts_sorted_N=experts.owner,
            topk_scores_experts_sorted_N=scores,
            experts=experts,
            ranks=ranks,
            route=route,
        )


class _Numbers:
    """Row counts that the host needs. The copy starts early, so that the GPU still has work while the host waits."""

    def __init__(self, counts: torch.Tensor, *of_ranks: torch.Tensor) -> None:
        self._counts, self._of_ranks = counts, of_ranks
        # torch.compile cannot trace events.
        self._copied = None if torch.compiler.is_compiling() else HostCopy(torch.cat([*of_ranks, counts]))

    def read(self) -> tuple[list[list[int]], int]:
        """Wait for the counts. Return the rows to and from each rank, and the total rows of this rank's experts."""
        if self._copied is None:
            *of_ranks, (pairs,) = (part.to("cpu").tolist() for part in (*self._of_ranks, self._counts.sum()[None]))
            return of_ranks, pairs
        numbers = self._copied.tolist()
        counts = [[numbers.pop(0) for _ in part] for part in self._of_ranks]
        return counts, sum(host_value_cache.store(self._counts, numbers))


def _by_expert(ids: torch.Tensor, experts: int) -> Copies:
    """Return the copies of rows for their experts `ids` [rows, top_k], sorted by expert. Unowned copies are last."""
    flat = ids.flatten()
    owner = torch.argsort(flat.short(), stable=True)  # radix sort needs fewer passes for short integers
    # The inverse permutation, by one scatter instead of a second sort.
    place = torch.empty_like(owner).scatter_(0, owner, torch.arange(len(owner), device=owner.device))
    return Copies(torch.where(flat < experts, place, -1).view_as(ids), owner)


def _by_padded_expert(ids: torch.Tensor, actual: torch.Tensor, counts: torch.Tensor, padding: int) -> Copies:
    """Do `_by_expert`, but pad each expert's `actual` copies to `counts`, by at most `padding` copies each."""
    chosen, owner = ids.flatten().short().sort(stable=True)  # unowned copies sort last
    # The padding of earlier experts moves the copies of an expert to later places.
    moved = F.pad((counts.cumsum(0) - counts) - (actual.cumsum(0) - actual), (0, 1))
    place = torch.arange(len(owner), device=owner.device) + moved[chosen.long()]
    most = len(owner) + len(counts) * padding
    owned = chosen < len(counts)
    # Unowned copies all go to one extra place at the end. The result has its maximum size, because its real size is on
    # the GPU: the caller cuts it once the host knows the size.
    by_place = owner.new_full((most + 1,), -1).scatter_(0, torch.where(owned, place, most), owner)
    where = torch.empty_like(place).scatter_(0, owner, torch.where(owned, place, -1))
    return Copies(where.view_as(ids), by_place)


def _by_rank(needed: torch.Tensor) -> Copies:
    """Return the copies of tokens for the ranks that need them [tokens, ranks], sorted by rank, unneeded ones last."""
    tokens, ranks = needed.shape
    wanted = needed.t().flatten()
    # A cumulative sum of the flags numbers the wanted copies in rank order, without a sort.
    position = torch.where(wanted, wanted.cumsum(0) - 1, tokens * ranks)
    slot = torch.arange(tokens * ranks, device=needed.device).view(tokens, ranks).t().flatten()
    owner = slot.new_empty(tokens * ranks + 1).scatter_(0, position, slot)
    return Copies(torch.where(wanted, position, -1).view(ranks, tokens).t().contiguous(), owner)


def convert(draft: ModelDraft) -> None:
    """Use OrderedDispatcher in all MoE layers that would use torchtitan's all-to-all dispatcher."""
    # On CPUs, torch 2.13 fails to compile expert parallelism with this dispatcher: a device mesh ends up among the
    # tensors that are saved for the backward pass.
    if not draft.recipe.trainer.compile or not compat.ON_CPU:
        compat.swap(draft.config, AllToAllTokenDispatcher, OrderedDispatcher)
        for _, config, *_ in draft.config.traverse(OrderedDispatcher.Config):
            config.alignment = BLOCK if draft.recipe.trainer.fp8 else 1

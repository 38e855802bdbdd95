"""Tokens on their way to experts and back: each travels once to a rank, and no pass adds rows up one by one.

torchtitan's dispatcher copies a token for each of its experts and sends all copies. Here a token goes once to each
rank that has experts for it, and is copied there; what its experts on that rank make of it is summed there by its
scores, and goes back as one row. With 8 of 128 experts on two ranks that is a quarter of the rows; DeepEP's kernels
send as few. Autograd does not know that indices are a permutation, so torchtitan's backward passes clear, sort and add
rows one at a time. Who knows both directions gathers in each (`kernels.rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed import GroupName
from torch.distributed.tensor import DeviceMesh
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalDispatchMetadata

from primeslurm.nn import compat
from primeslurm.nn.kernels import on_host, rows
from primeslurm.nn.kernels.fp8.blocks import BLOCK
from primeslurm.trainer.assembly.draft import ModelDraft
from primeslurm.trainer.distributed.world import HostCopy


@dataclass(frozen=True)
class Copies:
    """Which rows are copies of which: `where` [m, slots] and `owner` [n], as `kernels.rows` has them."""

    where: torch.Tensor
    owner: torch.Tensor

    def first(self, count: int) -> Copies:
        """The first `count` copies, if the others are nobody's."""
        return Copies(self.where, self.owner[:count])

    def spread(self, found: torch.Tensor) -> torch.Tensor:
        """Copy rows [m, dim] to [n, dim]."""
        return rows.spread(found, self.where, self.owner)

    def gathered(self, found: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Sum rows [n, dim], times weights [m, slots], to [m, dim]."""
        return rows.gathered(found, self.where, self.owner, weights)


@dataclass(frozen=True)
class Route:
    """A way between ranks, each of which gets the rows of [sent, dim] that are its own, in the order of ranks.

    Args:
        group: the name of the ranks' group.
        send: rows for each of them.
        receive: rows from each of them.
    """

    group: GroupName
    send: list[int]
    receive: list[int]

    def there(self, found: torch.Tensor) -> torch.Tensor:
        """Send rows [sum(send), ...]: [sum(receive), ...]."""
        return compat.all_to_all(found, self.group, self.receive, self.send)

    def back(self, found: torch.Tensor) -> torch.Tensor:
        """Send rows [sum(receive), ...] back: [sum(send), ...]."""
        return compat.all_to_all(found, self.group, self.send, self.receive)


@dataclass(frozen=True, kw_only=True)
class Metadata(LocalDispatchMetadata):
    """What `combine` needs: how rows were copied for experts, with which scores [rows, top_k].

    Between ranks also how tokens were copied for these, and the way.
    """

    experts: Copies
    ranks: Copies | None = None
    route: Route | None = None


class OrderedDispatcher(AllToAllTokenDispatcher):
    """torchtitan's, with fewer rows and fewer passes."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """As AllToAllTokenDispatcher's.

        Args:
            alignment: rows of an expert are filled up with zeros to a multiple of this: what products in FP8 take.
        """

        alignment: int = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._alignment = config.alignment

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Say which ranks share the experts; none if each has all."""
        super().wire_meshes(ep_mesh=ep_mesh)
        if ep_mesh is not None:
            # what a compiled layer is told once, instead of keeping a mesh for its backward pass
            self._group, self._size, self._rank = (
                ep_mesh.get_group().group_name,
                ep_mesh.size(),
                ep_mesh.get_local_rank(),
            )

    def dispatch(
        self, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor, counts_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Metadata]:
        """Bring tokens [tokens, dim] to the experts [tokens, top_k] that each chose.

        Returns:
            [rows, dim], sorted by expert; how many rows each expert of this rank has, with those that fill them up;
            and what `combine` needs.
        """
        if self.ep_mesh is None:
            counts_e = self._filled(counts_E)
            # Rows are as many as were chosen, unless they are filled up: then the host waits for the GPU.
            pairs = topk_expert_ids_TK.numel()
            numbers = None if self._alignment == 1 else _Numbers(counts_e)
            experts = self._copies(topk_expert_ids_TK, counts_E, counts_e)
            if numbers is not None:
                (), pairs = numbers.read()
            experts = experts.first(pairs)
            return experts.spread(x_TD), counts_e, self._metadata(topk_scores_TK, experts)
        size, own = self._size, self.num_experts // self._size
        rank_TK = topk_expert_ids_TK // own
        needed_TP = torch.zeros_like(rank_TK[:, :1], dtype=torch.bool).repeat(1, size).scatter_(1, rank_TK, True)
        with torch.no_grad():
            tallies = torch.cat([needed_TP.sum(0)[:, None], counts_E.view(size, own).long()], 1)
            received = compat.all_to_all(tallies, self._group)
            actual_e = received[:, 1:].sum(0)
            counts_e = self._filled(actual_e)
            numbers = _Numbers(counts_e, tallies[:, 0], received[:, 0])
        ranks = _by_rank(needed_TP)
        (send, receive), pairs = numbers.read()  # the one time that the host waits for the GPU
        ranks = ranks.first(sum(send))
        route = Route(self._group, send, receive)
        ids = route.there(ranks.spread(topk_expert_ids_TK))
        scores = route.there(ranks.spread(topk_scores_TK))
        # a row's other experts are on other ranks: they come last, and are nobody's
        mine = ids // own == self._rank
        ids = torch.where(mine, ids % own, own)
        experts = self._copies(ids, actual_e, counts_e).first(pairs)
        metadata = self._metadata(scores, experts, ranks, route)
        return experts.spread(route.there(ranks.spread(x_TD))), counts_e, metadata

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: LocalDispatchMetadata, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """Sum experts' outputs [rows, dim] of each token by its scores, in float32, where they are; then over ranks."""
        assert isinstance(metadata, Metadata)
        summed = metadata.experts.gathered(routed_output_RD, metadata.topk_scores_experts_sorted_N)
        if metadata.ranks is not None and metadata.route is not None:
            summed = metadata.ranks.gathered(metadata.route.back(summed))
        return summed.to(x_TD.dtype)

    def _filled(self, counts: torch.Tensor) -> torch.Tensor:
        """Rows of each expert with those that fill them up, from those without."""
        return counts if self._alignment == 1 else (counts + self._alignment - 1) // self._alignment * self._alignment

    def _copies(self, ids: torch.Tensor, actual: torch.Tensor, counts: torch.Tensor) -> Copies:
        """Copies for experts `ids`, which have `counts` places, of which `actual` are taken."""
        filling = self._alignment - 1
        return _by_filled(ids, actual, counts, filling) if filling else _by_expert(ids, len(counts))

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
    """What the host has to know of a dispatch: on its way from here on, so that the GPU has more to do meanwhile."""

    def __init__(self, counts: torch.Tensor, *of_ranks: torch.Tensor) -> None:
        self._counts, self._of_ranks = counts, of_ranks
        # A compiler knows nothing of events.
        self._copied = None if torch.compiler.is_compiling() else HostCopy(torch.cat([*of_ranks, counts]))

    def read(self) -> tuple[list[list[int]], int]:
        """Rows for and from each rank, and those of all of this rank's experts, which are noted beside `counts`."""
        if self._copied is None:
            *of_ranks, (pairs,) = (part.to("cpu").tolist() for part in (*self._of_ranks, self._counts.sum()[None]))
            return of_ranks, pairs
        numbers = self._copied.tolist()
        found = [[numbers.pop(0) for _ in part] for part in self._of_ranks]
        return found, sum(on_host.note(self._counts, numbers))


def _by_expert(ids: torch.Tensor, experts: int) -> Copies:
    """Copies of rows for their experts `ids` [rows, top_k], sorted by expert; those are last that are nobody's."""
    flat = ids.flatten()
    owner = torch.argsort(flat.short(), stable=True)  # short numbers are sorted in fewer passes
    place = torch.empty_like(owner).scatter_(0, owner, torch.arange(len(owner), device=owner.device))
    return Copies(torch.where(flat < experts, place, -1).view_as(ids), owner)


def _by_filled(ids: torch.Tensor, actual: torch.Tensor, counts: torch.Tensor, filling: int) -> Copies:
    """As `_by_expert`, but each expert has `counts` places, of which `actual` are taken, and at most `filling` not."""
    chosen, owner = ids.flatten().short().sort(stable=True)  # what is nobody's is last
    moved = F.pad((counts.cumsum(0) - counts) - (actual.cumsum(0) - actual), (0, 1))
    place = torch.arange(len(owner), device=owner.device) + moved[chosen.long()]
    most = len(owner) + len(counts) * filling
    somebodys = chosen < len(counts)
    by_place = owner.new_full((most + 1,), -1).scatter_(0, torch.where(somebodys, place, most), owner)
    where = torch.empty_like(place).scatter_(0, owner, torch.where(somebodys, place, -1))
    return Copies(where.view_as(ids), by_place)


def _by_rank(needed: torch.Tensor) -> Copies:
    """Copies of tokens for the ranks that need them, [tokens, ranks], sorted by rank; what nobody needs is last."""
    tokens, ranks = needed.shape
    wanted = needed.t().flatten()
    position = torch.where(wanted, wanted.cumsum(0) - 1, tokens * ranks)
    slot = torch.arange(tokens * ranks, device=needed.device).view(tokens, ranks).t().flatten()
    owner = slot.new_empty(tokens * ranks + 1).scatter_(0, position, slot)
    return Copies(torch.where(wanted, position, -1).view(ranks, tokens).t().contiguous(), owner)


def convert(draft: ModelDraft) -> None:
    """Have tokens of every layer with experts travel like this, unless another backend takes them there.

    On CPUs compiled layers keep torchtitan's way: there, expert parallelism compiled with this one fails in torch 2.13
    (a device mesh among the tensors that are saved for the backward pass).
    """
    if not draft.recipe.trainer.compile or not compat.ON_CPU:
        compat.swap(draft.config, AllToAllTokenDispatcher, OrderedDispatcher)
        for _, config, *_ in draft.config.traverse(OrderedDispatcher.Config):
            config.alignment = BLOCK if draft.recipe.trainer.fp8 else 1

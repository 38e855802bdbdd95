"""Context parallelism: each rank holds one contiguous shard of each row, and only attention sees the other shards.

- `ulysses`: an all-to-all before attention gives each rank whole rows of some heads, and a second one after it
  restores the shards. It moves less data and balances causal attention, but needs as many query heads as ranks.
- `allgather`: each rank gathers all keys and values of a layer and attends from its own queries. The backward pass
  reduce-scatters the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata, create_attention_mask

from primeslurm.nn import compat
from primeslurm.nn.layers.scan import HeadScan, Parameters, Tensors
from primeslurm.recipe.sections.trainer import Parallelism

Style = Literal["ulysses", "allgather"]
Attend = Callable[..., torch.Tensor]
Scan = Callable[[Tensors, Parameters, torch.Tensor], torch.Tensor]


class Dims(ParallelDims):
    """Parallel dimensions for torchtitan's model code, which must not add its own context parallelism to ours."""

    @classmethod
    def of(cls, layout: Parallelism, size: int, backend: str) -> Dims:
        """Return the dimensions of `size` ranks. FSDP gets the ranks that the layout does not use otherwise."""
        return cls(
            dp_replicate=layout.dp_replicate,
            dp_shard=size // (layout.dp_replicate * layout.cp),
            cp=layout.cp,
            tp=1,
            pp=1,
            ep=layout.ep,
            world_size=size,
            spmd_backend=backend,
        )

    @property
    def cp_enabled(self) -> bool:
        """False, so that torchtitan does not apply its own context parallelism. The mesh "cp" still exists."""
        return False


@dataclass(frozen=True)
class LocalDocuments:
    """The keys and documents that one rank's queries see, for varlen attention."""

    keys: tuple[tuple[int, int], ...]  # for each row: first visible key, and end of the visible keys
    metadata: VarlenMetadata  # document boundaries among this rank's queries and among the visible keys


@runtime_checkable
class Shardable(Protocol):
    """Attention masks that can be cut to one rank's shard, for layers that gather other ranks' tokens themselves."""

    def shard(self, group: ProcessGroup) -> Any:
        """Return the masks of this rank's shard of each row."""


@dataclass(frozen=True)
class ContextParallel:
    """Context parallelism of this rank: the style, and the ranks that share its rows."""

    style: Style
    group: ProcessGroup

    def shard(self, tensor: torch.Tensor) -> torch.Tensor:
        # Contiguous instead of head-and-tail pairs, because Ulysses and recurrences need rows in order. Packed rows
        # have many short documents, so causal attention is nearly balanced anyway.
        return tensor.chunk(self.group.size(), dim=1)[self.group.rank()].contiguous()

    def masks(self, masks: Any, seq_len: int) -> Any:
        """Convert attention masks of whole rows to those of this rank. A mapping has one mask per kind of layer."""
        if isinstance(masks, Shardable):
            return masks.shard(self.group)
        if self.style == "ulysses":
            return masks
        if isinstance(masks, Mapping):
            return {name: self.masks(mask, seq_len) for name, mask in masks.items()}
        if isinstance(masks, BlockMask):
            return local_block_mask(masks, self.group.rank(), self.group.size())
        return local_documents(masks, seq_len, self.group.rank(), self.group.size())

    def attach(self, model: torch.nn.Module) -> None:
        """Wrap the attention and recurrent layers of a model before FSDP. Raises ValueError for unsupported layers."""
        wrap = _ulysses if self.style == "ulysses" else _allgather
        for module in model.modules():
            if isinstance(module, FlexAttention | VarlenAttention):
                module.forward = wrap(module.forward, self.group)
            elif isinstance(module, HeadScan):
                self._attach_scan(module)

    def _attach_scan(self, scan: Any) -> None:
        # Each state depends on all earlier tokens, so whole rows are needed.
        if self.style != "ulysses":
            raise ValueError(f"cp_style: {self.style} has nothing to gather for recurrent layers; use ulysses")
        if scan.heads % self.group.size():
            raise ValueError(f"cp: {self.group.size()} does not divide the {scan.heads} heads of recurrent layers")
        scan.forward = _recurrence(scan.forward, self.group)


def _ulysses(attend: Attend, group: ProcessGroup) -> Attend:
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out_transform: Any = None, **options: Any
    ) -> torch.Tensor:
        if q.shape[2] % group.size():
            raise ValueError(
                f"cp: {group.size()} does not divide {q.shape[2]} attention heads; use cp_style: allgather"
            )
        k, v = (replicated(tensor, group.size()) for tensor in (k, v))
        q, k, v = whole_rows((q, k, v), group)
        if out_transform is None:
            return all_heads(attend(q, k, v, **options), group)
        # The transform may have parameters per head, so it needs the outputs and scores of all heads.
        out, lse = attend(q, k, v, out_transform=lambda *both: both, **options)
        return out_transform(all_heads(out, group), all_heads(lse.unsqueeze(-1), group).squeeze(-1))

    return forward


def _allgather(attend: Attend, group: ProcessGroup) -> Attend:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_masks: Any, **options: Any) -> Any:
        # One collective for keys and values, because latency dominates for short rows.
        both = compat.all_gather(torch.cat([k, v], dim=-1), 1, group)
        # Varlen kernels take only the visible keys of each row. A block mask addresses all of them.
        if isinstance(attention_masks, LocalDocuments):
            seen = zip(both, attention_masks.keys, strict=True)
            both = torch.cat([row[first:end] for row, (first, end) in seen]).unsqueeze(0)
            attention_masks = attention_masks.metadata
        k, v = both.split([k.shape[-1], v.shape[-1]], dim=-1)
        return attend(q, k, v, attention_masks=attention_masks, **options)

    return forward


def _recurrence(scan: Scan, group: ProcessGroup) -> Scan:
    def forward(by_token: Tensors, by_head: Parameters, positions: torch.Tensor) -> torch.Tensor:
        ranks = group.size()
        rows = whole_rows([replicated(tensor, ranks) for tensor in by_token], group)
        # Parameters of other ranks' heads get no gradient on this rank. FSDP sums the gradients over ranks.
        local_parameters = [
            None if tensor is None else replicated(tensor, ranks, dim=0).chunk(ranks)[group.rank()]
            for tensor in by_head
        ]
        return all_heads(scan(rows, local_parameters, compat.all_gather(positions, 1, group)), group)

    return forward


def replicated(tensor: torch.Tensor, ranks: int, dim: int = 2) -> torch.Tensor:
    """Repeat the heads of a tensor along `dim` until the ranks divide their number.

    Consecutive query heads share a key or value head, so each rank gets the heads that its own queries share.
    """
    return tensor.repeat_interleave(ranks // math.gcd(tensor.shape[dim], ranks), dim=dim)


def whole_rows(pieces: Sequence[torch.Tensor], group: ProcessGroup) -> list[torch.Tensor]:
    """Exchange tensors [rows, shard, heads, size] for [rows, seq_len, heads / ranks, size], in one all-to-all."""
    by_rank = [piece.unflatten(2, (group.size(), -1)).movedim(2, 0) for piece in pieces]
    sizes = [tensor.shape[3:].numel() for tensor in by_rank]
    received = compat.all_to_all(torch.cat([tensor.flatten(3) for tensor in by_rank], dim=-1), group)
    parts = received.movedim(0, 1).flatten(1, 2).split(sizes, dim=-1)
    return [part.unflatten(-1, tensor.shape[3:]) for part, tensor in zip(parts, by_rank, strict=True)]


def all_heads(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Invert `whole_rows`: exchange [rows, seq_len, heads / ranks, size] for [rows, shard, heads, size]."""
    by_rank = rows.unflatten(1, (group.size(), -1)).movedim(1, 0)
    return compat.all_to_all(by_rank.contiguous(), group).movedim(0, 2).flatten(2, 3)


def local_documents(documents: VarlenMetadata, seq_len: int, rank: int, ranks: int) -> LocalDocuments:
    """Return the keys and documents that one rank's queries see. `documents` are those of whole rows, row after row."""
    boundaries = documents.cu_seq_q.tolist()
    piece = seq_len // ranks
    keys, queries_of, keys_of = [], [], []
    for row in range(0, boundaries[-1], seq_len):
        first, end = row + rank * piece, row + (rank + 1) * piece
        here = [(a, min(b, end)) for a, b in pairwise(boundaries) if a < end and b > first]
        keys.append((here[0][0] - row, end - row))
        queries_of += [b - max(a, first) for a, b in here]
        keys_of += [b - a for a, b in here]
    cumulative = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=documents.cu_seq_q.device)
        for lengths in (queries_of, keys_of)
    )
    return LocalDocuments(tuple(keys), VarlenMetadata(*cumulative, max(queries_of), max(keys_of)))


def local_block_mask(mask: BlockMask, rank: int, ranks: int) -> BlockMask:
    rows, heads, queries, keys = mask.shape
    first = rank * (queries // ranks)

    def shifted(row: Any, head: Any, query: Any, key: Any) -> Any:
        return mask.mask_mod(row, head, query + first, key)

    device = mask.kv_indices.device
    return create_attention_mask(
        shifted, rows, heads, queries // ranks, keys, device=device, BLOCK_SIZE=mask.BLOCK_SIZE
    )

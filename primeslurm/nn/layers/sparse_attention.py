"""Sparse latent attention (DSA): an indexer scores all keys cheaply, attention then sees only the best of them.

Rows of packed documents may be split over context-parallel ranks. Attention's queries stay where they are; what they
need of the other ranks' tokens is small and gathered once a layer: compressed key, rotary key and the indexer's key,
704 values a token in GLM-5. Gradients of the gathered keys are reduced and scattered back. The indexer's queries, which
are scored with all keys before them, are shared out so that each rank scores equally many.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch.distributed import GroupName, ProcessGroup
from torch.library import custom_op
from torchtitan.models.common import Linear
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.models.deepseek_v3.model import Attention
from torchtitan.protocols.module import Module

from primeslurm.nn import compat
from primeslurm.nn.kernels.head_products import head_products
from primeslurm.nn.kernels.sparse_mla import dense_mla, sparse_mla
from primeslurm.nn.layers.fp8 import FP8Linear, rounded

SCORES = 2**28
"""Index scores held at once, before they are summed over heads; 1 GiB."""
QUERIES = 2048
"""Queries whose keys are selected at once: keys after the last of them are not looked at."""


@dataclass(frozen=True)
class Context:
    """Which keys the queries of this rank may see. Travels in the place of attention masks."""

    first: torch.Tensor
    """Index in its whole row of the first token of each query's document, [rows, local_len]."""
    last: torch.Tensor
    """Index of each query itself, [rows, local_len]."""
    offset: int = 0
    """Index of the first local query."""
    group: ProcessGroup | None = None
    """Ranks that hold the rest of the rows."""
    selections: dict[int, torch.Tensor] = field(default_factory=dict)
    """What a layer selected, by layer: for the layers that share it, and for itself when it is computed anew."""

    @staticmethod
    def of(positions: torch.Tensor) -> Context:
        """The context of whole rows; `positions` [rows, len] restart at 0 with every document."""
        index = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        return Context(index - positions, index)

    def shard(self, group: ProcessGroup) -> Context:
        """This rank's part of whole rows, of which each rank of the group has one contiguous piece."""
        pieces = self.first.chunk(group.size(), dim=1), self.last.chunk(group.size(), dim=1)
        first, last = (parts[group.rank()] for parts in pieces)
        return Context(first, last, group.rank() * pieces[0][0].shape[1], group)

    def gather(self, keys: torch.Tensor) -> torch.Tensor:
        """Per-token values [rows, local_len, values] of whole rows; gradients are summed over ranks and scattered."""
        return keys if self.group is None else compat.all_gather(keys, 1, self.group)


class Indexer(Module):
    """Scores every key for every query with a few small heads. Frozen: what it decides, a top-k, has no gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The first `rope_dim` of the `head_dim` values of a head are rotated."""

        heads: int
        head_dim: int
        rope_dim: int
        interleaved: bool
        """Neighbours are rotated together; else each of the first half of `rope_dim` with one of the second."""
        top_k: int
        wq_b: Linear.Config
        wk: Linear.Config
        k_norm: LayerNorm.Config
        weights_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wq_b = config.wq_b.build()
        self.wk = config.wk.build()
        self.k_norm = config.k_norm.build()
        self.weights_proj = config.weights_proj.build()
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def forward(
        self, x: torch.Tensor, compressed: torch.Tensor, rope: Module, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [rows, len, heads, head_dim], keys [rows, len, head_dim] and weights of heads [rows, len, heads].

        Args:
            x: the layer's input.
            compressed: the layer's compressed queries.
            rope: the layer's rotary embedding.
            positions: of the tokens within their documents.
        """
        rows, length, _ = x.shape
        config = self.config
        parts = [config.rope_dim, config.head_dim - config.rope_dim]
        with torch.no_grad():
            heads = self.wq_b(compressed).view(rows, length, config.heads, config.head_dim)
            query, query_rest = heads.split(parts, -1)
            key, key_rest = self.k_norm(self.wk(x)).unsqueeze(2).split(parts, -1)
            if not config.interleaved:  # scores are the same in whichever order both have their values
                query, key = _neighbours(query), _neighbours(key)
            query, key = rope(query, key, positions)
            weight = self.weights_proj(x).float() * (config.heads * config.head_dim) ** -0.5
            return torch.cat([query, query_rest], -1), torch.cat([key, key_rest], -1).squeeze(2), weight


def _neighbours(values: torch.Tensor) -> torch.Tensor:
    """Values of which those of both halves alternate."""
    return values.unflatten(-1, (2, -1)).mT.flatten(-2)


def select(query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, context: Context, top_k: int) -> torch.Tensor:
    """Indices [rows, local_len, top_k], int32, of the best keys that each query may see, in any order; -1 for none.

    Args:
        query: of the indexer, [rows, local_len, heads, head_dim].
        keys: of the indexer, of whole rows, [rows, len, head_dim].
        weight: of each head, [rows, local_len, heads].
        context: what each query may see.
        top_k: how many are selected.
    """
    group = context.group.group_name if context.group else ""
    indices: torch.Tensor = _select_keys(
        query, keys.detach(), weight, context.first, context.last, context.offset, top_k, group
    )
    return indices


def _select(
    query: torch.Tensor,
    keys: torch.Tensor,
    weight: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    offset: int,
    top_k: int,
    group: str,
) -> torch.Tensor:
    """Ranks as far from either end of the rows swap their later halves: later queries are scored with more keys.

    Each rank then scores equally many, where the last of many would score twice the mean while the others wait.
    """
    if not group:
        return _best(query, weight, first, last, keys, offset, top_k)
    length, whole = query.shape[1], keys.shape[1]
    half, partner = length // 2, whole - length - offset
    swap = partial(_swap, partner=partner // length, ranks=whole // length, group=group)
    own = query[:, :half], weight[:, :half], first[:, :half], last[:, :half]
    theirs = swap(query[:, half:]), swap(weight[:, half:]), swap(first[:, half:]), swap(last[:, half:])
    earlier = _best(*own, keys, offset, top_k)
    later = swap(_best(*theirs, keys, partner + half, top_k))
    return torch.cat([earlier, later], 1)


def _swap(tensor: torch.Tensor, partner: int, ranks: int, group: str) -> torch.Tensor:
    """What the partner has in the place of a tensor; in the middle of an odd number a rank is its own."""
    rows = [len(tensor) if rank == partner else 0 for rank in range(ranks)]
    return compat.all_to_all(tensor.contiguous(), GroupName(group), rows, rows)


def _best(
    query: torch.Tensor,
    weight: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    keys: torch.Tensor,
    offset: int,
    top_k: int,
) -> torch.Tensor:
    """As `select`, of consecutive queries, the first of which is token `offset` of its row."""
    rows, length, heads, width = query.shape
    whole = keys.shape[1]
    on_gpu = query.is_cuda and query.dtype == torch.bfloat16 and width & (width - 1) == 0
    score = _scores_on_gpu if on_gpu else _scores
    selected = torch.full((rows, length, min(top_k, whole)), -1, dtype=torch.int32, device=keys.device)
    step = min(QUERIES, max(1, SCORES // (whole if on_gpu else heads * whole)))
    for row in range(rows):
        for start in range(0, length, step):
            part = slice(start, min(start + step, length))
            seen = min(offset + part.stop, whole)
            scores = score(query[row, part], keys[row, :seen], weight[row, part], first[row, part], last[row, part])
            best = scores.topk(min(top_k, seen), -1, sorted=False)
            selected[row, part, : best.indices.shape[-1]] = best.indices.masked_fill(best.values.isneginf(), -1).int()
    return selected


def _scores(
    query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """As `index_kernel.index_scores`."""
    products = (query.flatten(0, 1).float() @ keys.float().t()).relu_().view(*query.shape[:2], -1)
    scores = (weight.unsqueeze(1) @ products).squeeze(1)
    index = torch.arange(len(keys), device=keys.device)
    return scores.masked_fill_((index < first[:, None]) | (index > last[:, None]), float("-inf"))


def _scores_on_gpu(
    query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    from primeslurm.nn.kernels.index_kernel import index_scores

    return index_scores(query, keys, weight, first, last)


# An operator of its own: selective activation checkpointing would otherwise keep the scores of every chunk.
_select_keys = custom_op("primeslurm::select_keys", _select, mutates_args=())
SELECTING = torch.ops.primeslurm.select_keys.default
"""What activation checkpointing sees of `select`."""


class SparseMla(Module):
    """The core of attention: absorbs the up-projection of keys and values, and attends to selected keys."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """`dense`: all scores at once, for rows not longer than the selection."""

        dense: bool

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._attend = dense_mla if config.dense else sparse_mla

    def forward(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        keys: torch.Tensor,
        up: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Outputs of all heads [rows, queries, heads, v_head_dim].

        Args:
            q_nope: [rows, queries, heads, nope].
            q_rope: [rows, queries, heads, rope].
            keys: compressed keys and their rotary part, [rows, keys, rank + rope].
            up: weight of the up-projection, [heads x (nope + v_head_dim), rank].
            indices: the selected keys, as `sparse_mla` takes them.
            scale: of the scores.
        """
        (heads, nope), rank = q_nope.shape[2:], up.shape[1]
        up_key, up_value = up.view(heads, -1, rank).tensor_split([nope], 1)
        query = head_products(q_nope, up_key, q_rope)
        return head_products(self._attend(query, keys, indices, rank, scale), up_value.mT)


class SparseAttention(Attention):
    """Latent attention to the keys that this layer's indexer, or that of an earlier layer, selects."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        """`inner_attention` is a `SparseMla.Config`."""

        indexer: Indexer.Config | None
        """None: the layer uses the selection of layer `selected_by`."""
        selected_by: int
        shared: bool
        """Later layers use this layer's selection."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.indexer = config.indexer.build() if config.indexer else None
        self._selected_by, self._shared = config.selected_by, config.shared
        self.keeps_selection = False
        """For when the whole layer is computed anew, by activation checkpointing."""

    def forward(self, x: torch.Tensor, attention_masks: Context, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's input [rows, local_len, dim] to the attention's output of that shape."""
        rows, length, _ = x.shape
        compressed = self.q_norm(self.wq_a(x))
        query = self.wq_b(compressed).view(rows, length, self.n_heads, self.qk_head_dim)
        q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        q_rope, k_rope = self.rope(q_rope, k_rope.unsqueeze(2), positions)
        own = torch.cat([self.kv_norm(latent), k_rope.squeeze(2)], -1)
        keys, indices = self._select(x, compressed, own, attention_masks, positions)
        # The weight itself: what absorbs it never calls the projection. Engines absorb what they quantised.
        up = rounded(self.wkv_b.weight) if isinstance(self.wkv_b, FP8Linear) else self.wkv_b.weight
        out = self.inner_attention(q_nope, q_rope, keys, up, indices, self.softmax_scale)
        result: torch.Tensor = self.wo(out.flatten(2))
        return result

    def _select(
        self,
        x: torch.Tensor,
        compressed: torch.Tensor,
        own: torch.Tensor,
        context: Context,
        positions: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of whole rows, and which of them each local query attends to.

        Layers that share a selection are behind the one that made it. They are computed anew before it is, so nobody
        wants the selection after that.
        """
        if self.indexer is None:
            return context.gather(own), context.selections[self._selected_by]
        if self.keeps_selection and self._selected_by in context.selections:
            return context.gather(own), context.selections.pop(self._selected_by)
        query, key, weight = self.indexer(x, compressed, self.rope, positions)
        keys, index_keys = context.gather(torch.cat([own, key], -1)).split([own.shape[-1], key.shape[-1]], -1)
        indices = select(query, index_keys, weight, context, self.indexer.config.top_k)
        if self._shared or (self.keeps_selection and torch.is_grad_enabled()):
            context.selections[self._selected_by] = indices
        return keys, indices


def sparse(attention: Any, indexer: Indexer.Config | None, selected_by: int, shared: bool, dense: bool) -> Any:
    """The config of sparse attention with the projections of latent attention's config."""
    kept = {f.name: getattr(attention, f.name) for f in fields(attention) if f.init and f.name != "inner_attention"}
    core = SparseMla.Config(dense=dense)
    return SparseAttention.Config(**kept, inner_attention=core, indexer=indexer, selected_by=selected_by, shared=shared)

"""Sparse latent attention (DSA): an indexer scores all keys cheaply, and attention sees only the best ones.

With context parallelism, queries stay on their rank. Each layer gathers the other ranks' compressed keys, rotary keys
and indexer keys once, which are only 704 values per token in GLM-5. Gradients of the gathered keys are
reduce-scattered. The indexer's queries are distributed so that all ranks compute the same number of scores.
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
from primeslurm.nn.kernels.sparse_mla import dense_mla, head_products, sparse_mla
from primeslurm.nn.layers.fp8 import FP8Linear, rounded

# Maximum number of index scores in memory, before they are summed over heads (1 GiB)
SCORES = 2**28
# Queries per selection. Keys after the last of them are skipped.
QUERIES = 2048


@dataclass(frozen=True)
class Context:
    """Visible keys of this rank's queries. It is passed in place of attention masks."""

    first: torch.Tensor  # index (in the whole row) of the first token of each query's document [rows, local_len]
    last: torch.Tensor  # index of each query itself [rows, local_len]
    offset: int = 0  # index of the first local query
    group: ProcessGroup | None = None  # Ranks that share the rows. None: this rank has whole rows.
    selections: dict[int, torch.Tensor] = field(default_factory=dict)
    """Selected keys by layer, for layers that share them and for the recomputation of the layer itself."""

    @staticmethod
    def of(positions: torch.Tensor) -> Context:
        """Return the context of whole rows. `positions` [rows, len] restart at 0 with every document."""
        index = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        return Context(index - positions, index)

    def shard(self, group: ProcessGroup) -> Context:
        pieces = self.first.chunk(group.size(), dim=1), self.last.chunk(group.size(), dim=1)
        first, last = (parts[group.rank()] for parts in pieces)
        return Context(first, last, group.rank() * pieces[0][0].shape[1], group)

    def gather(self, keys: torch.Tensor) -> torch.Tensor:
        """Gather per-token values [rows, local_len, values] of whole rows. Gradients are reduce-scattered."""
        return keys if self.group is None else compat.all_gather(keys, 1, self.group)


class Indexer(Module):
    """Scores every key for every query with a few small heads. Frozen, because a top-k choice has no gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes of the indexer. Rotary embedding applies to the first `rope_dim` values of each head."""

        heads: int
        head_dim: int
        rope_dim: int
        interleaved: bool
        """Whether RoPE rotates neighbouring values, instead of values of the first and the second half."""
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
        """Return queries [rows, len, heads, head_dim], keys [rows, len, head_dim] and head weights [rows, len, heads].

        `x` and `compressed` are the input and the compressed queries of the layer.
        """
        rows, length, _ = x.shape
        config = self.config
        parts = [config.rope_dim, config.head_dim - config.rope_dim]
        with torch.no_grad():
            heads = self.wq_b(compressed).view(rows, length, config.heads, config.head_dim)
            query, query_rest = heads.split(parts, -1)
            key, key_rest = self.k_norm(self.wk(x)).unsqueeze(2).split(parts, -1)
            if not config.interleaved:  # scores do not change if queries and keys are permuted alike
                query, key = _neighbours(query), _neighbours(key)
            query, key = rope(query, key, positions)
            weight = self.weights_proj(x).float() * (config.heads * config.head_dim) ** -0.5
            return torch.cat([query, query_rest], -1), torch.cat([key, key_rest], -1).squeeze(2), weight


def _neighbours(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(-1, (2, -1)).mT.flatten(-2)


def select(query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, context: Context, top_k: int) -> torch.Tensor:
    """Return the best visible keys of each query [rows, local_len, top_k] int32, unordered, -1 for none.

    Indexer queries are [rows, local_len, heads, head_dim], keys of whole rows [rows, len, head_dim], and head weights
    [rows, local_len, heads].
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
    # Later queries are scored with more keys. Rank i and rank n - 1 - i therefore swap the later halves of their
    # queries, so that all ranks compute equally many scores. Otherwise the last rank would compute twice the mean.
    if not group:
        return _best(query, weight, first, last, keys, offset, top_k)
    length, whole = query.shape[1], keys.shape[1]
    half, partner = length // 2, whole - length - offset
    swap = partial(_swap, partner=partner // length, ranks=whole // length, group=group)
    early_queries = query[:, :half], weight[:, :half], first[:, :half], last[:, :half]
    partner_queries = swap(query[:, half:]), swap(weight[:, half:]), swap(first[:, half:]), swap(last[:, half:])
    earlier = _best(*early_queries, keys, offset, top_k)
    later = swap(_best(*partner_queries, keys, partner + half, top_k))
    return torch.cat([earlier, later], 1)


def _swap(tensor: torch.Tensor, partner: int, ranks: int, group: str) -> torch.Tensor:
    """Exchange a tensor with the partner rank. The middle rank of an odd number is its own partner."""
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
    """Do `select` for consecutive queries of one rank. The first query is token `offset` of its row."""
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
    products = (query.flatten(0, 1).float() @ keys.float().t()).relu_().view(*query.shape[:2], -1)
    scores = (weight.unsqueeze(1) @ products).squeeze(1)
    index = torch.arange(len(keys), device=keys.device)
    return scores.masked_fill_((index < first[:, None]) | (index > last[:, None]), float("-inf"))


def _scores_on_gpu(
    query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    from primeslurm.nn.kernels.index_kernel import index_scores

    return index_scores(query, keys, weight, first, last)


# A custom operator, because selective activation checkpointing would otherwise save the scores of every chunk.
_select_keys = custom_op("primeslurm::select_keys", _select, mutates_args=())
# The operator of `select`, as activation checkpointing sees it
SELECTING = torch.ops.primeslurm.select_keys.default


class SparseMla(Module):
    """Core of the attention: absorbs the up-projections of keys and values, and attends to the selected keys."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Which of two ways to compute attention to the selected keys."""

        dense: bool  # whether to compute all scores at once, for rows not longer than the selection

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._dense = config.dense

    def forward(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        keys: torch.Tensor,
        up: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return outputs [rows, queries, heads, v_head_dim] of queries [rows, queries, heads, nope or rope].

        `keys` are compressed keys and their rotary part [rows, keys, rank + rope], `up` the weight of the up-projection
        [heads * (nope + v_head_dim), rank], and `indices` the selected keys as for `sparse_mla`.
        """
        (heads, nope), rank = q_nope.shape[2:], up.shape[1]
        up_key, up_value = up.view(heads, -1, rank).tensor_split([nope], 1)
        query = head_products(q_nope, up_key, q_rope)
        # A row may hold several sequences.
        attend = dense_mla if self._dense and keys.shape[1] <= indices.shape[-1] else sparse_mla
        return head_products(attend(query, keys, indices, rank, scale), up_value.mT)


class SparseAttention(Attention):
    """Latent attention to the keys that the indexer of this layer or of an earlier one selects."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        """Latent attention's config with an indexer. `inner_attention` is a `SparseMla.Config`."""

        indexer: Indexer.Config | None  # Indexer. None: the layer uses the selection of layer `selected_by`.
        selected_by: int
        shared: bool  # whether later layers use this layer's selection

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.indexer = config.indexer.build() if config.indexer else None
        self._selected_by, self._shared = config.selected_by, config.shared
        self.keeps_selection = False
        """Whether to store the selection for the recomputation of the layer (activation checkpointing)."""

    def forward(self, x: torch.Tensor, attention_masks: Context, positions: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, _ = x.shape
        compressed = self.q_norm(self.wq_a(x))
        query = self.wq_b(compressed).view(rows, length, self.n_heads, self.qk_head_dim)
        q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        q_rope, k_rope = self.rope(q_rope, k_rope.unsqueeze(2), positions)
        local_keys = torch.cat([self.kv_norm(latent), k_rope.squeeze(2)], -1)
        keys, indices = self._select(x, compressed, local_keys, attention_masks, positions)
        # The weight is absorbed, so the projection is never called. Engines absorb the quantized weight.
        up = rounded(self.wkv_b.weight) if isinstance(self.wkv_b, FP8Linear) else self.wkv_b.weight
        out = self.inner_attention(q_nope, q_rope, keys, up, indices, self.softmax_scale)
        result: torch.Tensor = self.wo(out.flatten(2))
        return result

    def _select(
        self,
        x: torch.Tensor,
        compressed: torch.Tensor,
        local_keys: torch.Tensor,
        context: Context,
        positions: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of whole rows, and the indices of those that each local query attends to."""
        # The backward pass recomputes layers that share a selection before the layer that made it, so the latter may
        # remove the selection.
        if self.indexer is None:
            return context.gather(local_keys), context.selections[self._selected_by]
        if self.keeps_selection and self._selected_by in context.selections:
            return context.gather(local_keys), context.selections.pop(self._selected_by)
        query, key, weight = self.indexer(x, compressed, self.rope, positions)
        keys, index_keys = context.gather(torch.cat([local_keys, key], -1)).split(
            [local_keys.shape[-1], key.shape[-1]], -1
        )
        indices = select(query, index_keys, weight, context, self.indexer.config.top_k)
        if self._shared or (self.keeps_selection and torch.is_grad_enabled()):
            context.selections[self._selected_by] = indices
        return keys, indices


def sparse(attention: Any, indexer: Indexer.Config | None, selected_by: int, shared: bool, dense: bool) -> Any:
    """Return the config of sparse attention with the projections of a latent attention config."""
    values = {f.name: getattr(attention, f.name) for f in fields(attention) if f.init and f.name != "inner_attention"}
    core = SparseMla.Config(dense=dense)
    return SparseAttention.Config(
        **values, inner_attention=core, indexer=indexer, selected_by=selected_by, shared=shared
    )

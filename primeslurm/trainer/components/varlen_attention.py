"""Attention over packed documents, given by their boundaries. Queries may be only the last tokens of a document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torchtitan.models.common import attention as titan
from torchtitan.models.common.attention import VarlenMetadata

from primeslurm.nn import compat
from primeslurm.nn.layers.prefix_tree import BranchKeys
from primeslurm.trainer.base.model_draft import ModelDraft

# Head sizes for which FlashAttention 3 and 4 are known to compile
_SIZES = (64, 128, 256)

OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class VarlenAttention(titan.VarlenAttention):
    """torchtitan's varlen attention, extended to more keys than queries, and to CPUs."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.VarlenAttention.Config):
        """torchtitan's config, unchanged. It builds this class."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata | BranchKeys,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
    ) -> torch.Tensor:
        """Attend from queries [rows, length, heads, size] to keys and values [rows, keys, kv_heads, size].

        `out_transform` computes the result from outputs and log-sum-exps [rows, length, heads].
        """
        # With context parallelism or shared prefixes, queries are the last tokens of the visible documents, so there
        # are more keys.
        if isinstance(attention_masks, BranchKeys):
            k_BLNH, v_BLNH = attention_masks.gather(k_BLNH), attention_masks.gather(v_BLNH)
            attention_masks = attention_masks.metadata
        attend = dense if compat.ON_CPU else flash
        q, k, v = (tensor.flatten(0, 1) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        out, lse = attend(q, k, v, attention_masks, scale, self.window_size)
        rows, length = q_BLNH.shape[:2]
        out = out.unflatten(0, (rows, length)).to(q_BLNH.dtype)
        return out if out_transform is None else out_transform(out, lse.T.unflatten(0, (rows, length)))


def convert(draft: ModelDraft) -> None:
    compat.swap(draft.config, titan.VarlenAttention, VarlenAttention)


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: VarlenMetadata,
    scale: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention in bfloat16 with FlashAttention. Arguments and results are those of `dense`."""
    second_generation = current_flash_attention_impl() in (None, "FA2")
    value_size, scale = v.shape[-1], scale if scale is not None else q.shape[-1] ** -0.5
    q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
    if second_generation:
        v = _pad(v, k.shape[-1])  # FlashAttention 2 requires equal head sizes
    elif not _is_latent(q, k, v):
        size = next(size for size in _SIZES if size >= max(k.shape[-1], value_size))
        q, k, v = (_pad(tensor, size) for tensor in (q, k, v))
    out, lse = varlen_attn(
        q,
        k,
        v,
        documents.cu_seq_q,
        documents.cu_seq_k,
        documents.max_q,
        documents.max_k,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=window,
        enable_gqa=q.shape[1] != k.shape[1],
        # FlashAttention 2 sometimes returns NaN if it chooses the number of splits itself.
        num_splits=1 if second_generation else None,
    )
    return out[..., :value_size], lse


def _is_latent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    # Latent attention (MLA) is the only case in which the kernels support values narrower than keys.
    return q.shape[1:] == k.shape[1:] and (k.shape[-1], v.shape[-1]) == (192, 128)


def _pad(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Pad every head with zeros, which do not change scores."""
    return F.pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: VarlenMetadata,
    scale: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of q [queries, heads, size] to k and v [keys, kv_heads, size] with a dense mask.

    `scale` None is 1 / sqrt(size). `window` is the number of keys visible before and after a query, -1 for all. Returns
    outputs [queries, heads, value_size] and log-sum-exps of the scores [heads, queries].
    """
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) * (scale if scale is not None else q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~visible(documents, window), -torch.inf)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1), v), scores.logsumexp(-1)


def visible(documents: VarlenMetadata, window: tuple[int, int]) -> torch.Tensor:
    """Return the keys that each query sees [queries, keys]. The last query of a document is its last key."""
    query_document, query_position = _positions(documents.cu_seq_q)
    key_document, key_position = _positions(documents.cu_seq_k)
    behind = query_position[:, None] - key_position[None, :]
    seen = query_document[:, None] == key_document[None, :]
    left, right = window
    if left >= 0:
        seen &= behind <= left
    if right >= 0:
        seen &= -behind <= right
    return seen


def _positions(boundaries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the document of each token, and its (negative) distance from the end of that document."""
    lengths = boundaries.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=boundaries.device), lengths)
    index = torch.arange(int(boundaries[-1]), device=boundaries.device)
    return document, index - boundaries[1:][document]

"""Attention over packed documents given by their boundaries; queries may be only a document's last tokens."""

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
from primeslurm.trainer.base.model_draft import ModelDraft

_SIZES = (64, 128, 256)
"""Of heads, for which newer kernels are known to compile."""

OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class VarlenAttention(titan.VarlenAttention):
    """torchtitan's, but keys may be more than queries: context parallelism leaves each rank a part of the queries.

    A document's queries are its last tokens. On CPU, which has no such kernel, the same by a dense mask.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.VarlenAttention.Config):
        """As torchtitan's."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
    ) -> torch.Tensor:
        """Attend from queries to keys and values; rows are packed one after another.

        Args:
            q_BLNH: queries [rows, length, heads, size].
            k_BLNH: keys [rows, keys, kv_heads, size].
            v_BLNH: values [rows, keys, kv_heads, size].
            attention_masks: boundaries of documents among all queries and among all keys.
            scale: of the scores; 1 / sqrt(size) if not given.
            enable_gqa: ignored, the heads say so themselves.
            out_transform: makes the result of the outputs and the log-sum-exp of the scores [rows, length, heads].
        """
        attend = dense if compat.ON_CPU else flash
        q, k, v = (tensor.flatten(0, 1) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        out, lse = attend(q, k, v, attention_masks, scale, self.window_size)
        rows, length = q_BLNH.shape[:2]
        out = out.unflatten(0, (rows, length)).to(q_BLNH.dtype)
        return out if out_transform is None else out_transform(out, lse.T.unflatten(0, (rows, length)))


def convert(draft: ModelDraft) -> None:
    """Make every varlen attention of a model this one."""
    compat.swap(draft.config, titan.VarlenAttention, VarlenAttention)


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: VarlenMetadata,
    scale: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in bfloat16: [tokens, heads, size] to outputs of that shape, and log-sum-exp [heads, tokens]."""
    second_generation = current_flash_attention_impl() in (None, "FA2")
    value_size, scale = v.shape[-1], scale if scale is not None else q.shape[-1] ** -0.5
    q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
    if second_generation:
        v = _wide(v, k.shape[-1])  # FlashAttention 2 knows one head size
    elif not _is_latent(q, k, v):
        size = next(size for size in _SIZES if size >= max(k.shape[-1], value_size))
        q, k, v = (_wide(tensor, size) for tensor in (q, k, v))
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
        # FlashAttention 2 now and then makes NaN when it chooses the number of splits itself.
        num_splits=1 if second_generation else None,
    )
    return out[..., :value_size], lse


def _is_latent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether heads are those of latent attention: with other sizes, values must be as wide as keys."""
    return q.shape[1:] == k.shape[1:] and (k.shape[-1], v.shape[-1]) == (192, 128)


def _wide(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Add zeros at the end of every head: they add nothing to scores."""
    return F.pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: VarlenMetadata,
    scale: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute as `flash` does, with all scores at once and in the tensors' dtype.

    Args:
        q: [queries, heads, head size].
        k: [keys, heads or a divisor of them, head size].
        v: [keys, as many heads, value size].
        documents: where the documents begin that are packed in both.
        scale: of the scores; None: 1 / sqrt(head size).
        window: keys that a query sees before and after itself; -1 for all.

    Returns:
        Outputs [queries, heads, value size], and the logs of the softmax's denominators [heads, queries].
    """
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) * (scale if scale is not None else q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~visible(documents, window), -torch.inf)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1), v), scores.logsumexp(-1)


def visible(documents: VarlenMetadata, window: tuple[int, int]) -> torch.Tensor:
    """Return which key each query sees, [queries, keys].

    Args:
        documents: boundaries among queries and keys; a document's last query is its last key.
        window: how many keys before and after its own position a query sees; -1 is all of them.
    """
    query_document, query_position = _places(documents.cu_seq_q)
    key_document, key_position = _places(documents.cu_seq_k)
    behind = query_position[:, None] - key_position[None, :]
    seen = query_document[:, None] == key_document[None, :]
    left, right = window
    if left >= 0:
        seen &= behind <= left
    if right >= 0:
        seen &= -behind <= right
    return seen


def _places(boundaries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of every token which document it is of, and how far it is from that document's end (negative)."""
    lengths = boundaries.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=boundaries.device), lengths)
    index = torch.arange(int(boundaries[-1]), device=boundaries.device)
    return document, index - boundaries[1:][document]

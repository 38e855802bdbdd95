"""Attention over packed rows whose documents share a prefix.

The prefix of such a document is in the row once. Its branches follow. Each continues the prefix, sees the prefix and
itself, and sees no other branch. `branches` [rows, length] numbers the branches of a document from 1. It is 0 for
prefixes, and for documents without branches. `positions` [rows, length] restart at 0 with every document. In each
branch they continue those of the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torchtitan.models.common.attention import VarlenMetadata


class BranchKeys(NamedTuple):
    """The keys of every branch, for varlen attention, which needs them to be contiguous."""

    key_index: torch.Tensor  # [keys]: token of each key, row after row. A prefix is repeated for each of its branches.
    metadata: VarlenMetadata  # The queries of a branch are the last tokens of its keys.

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the values of all keys [1, keys, ...] from those of tokens [rows, length, ...]."""
        # In float32, because the gradient of a prefix is the sum of those of its branches.
        return tokens.flatten(0, 1).float().index_select(0, self.key_index).to(tokens.dtype).unsqueeze(0)


def starts(positions: torch.Tensor, branches: torch.Tensor | None) -> torch.Tensor:
    """Return which tokens are the first of a document or branch [rows, length]."""
    first = positions == 0
    if branches is not None:
        first[:, 1:] |= branches[:, 1:] != branches[:, :-1]
    return first


def branch_keys(positions: torch.Tensor, branches: torch.Tensor) -> BranchKeys:
    """Return the keys of every prefix, branch, and document without branches."""
    first = starts(positions, branches).flatten().nonzero().squeeze(1)
    position = positions.flatten()
    queries = torch.cat([first, first.new_tensor([position.numel()])]).diff()
    prefix = position[first]  # the position of a branch's first token is the length of its prefix
    documents = (position == 0).nonzero().squeeze(1)
    document = documents[torch.searchsorted(documents, first, right=True) - 1]
    keys = prefix + queries
    cu_seq_q, cu_seq_k = (torch.cat([n.new_zeros(1), n.cumsum(0)]) for n in (queries, keys))
    owner = torch.repeat_interleave(keys)  # branch of each key
    offset = torch.arange(owner.numel(), device=owner.device) - cu_seq_k[owner]
    own = offset - prefix[owner]
    key_index = torch.where(own < 0, document[owner] + offset, first[owner] + own)
    longest = torch.stack([queries.max(), keys.max()]).tolist()
    return BranchKeys(key_index, VarlenMetadata(cu_seq_q.int(), cu_seq_k.int(), *longest))


def branch_mask(positions: torch.Tensor, branches: torch.Tensor, window: int | None) -> Callable[..., torch.Tensor]:
    """Return flex attention's mask function, by which queries see prefix and branch. `window` None: no window."""
    document = (positions == 0).cumsum(1)

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        of_key = branches[row, key]
        seen = (document[row, query] == document[row, key]) & (key <= query)
        seen = seen & ((of_key == 0) | (of_key == branches[row, query]))
        return seen & (positions[row, query] - positions[row, key] < window) if window else seen

    return sees

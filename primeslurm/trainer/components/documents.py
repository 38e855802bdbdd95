"""Documents of packed rows: which trained tokens belong to the same sequence, also across context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Documents:
    """The documents of a micro batch: the packed sequences, and the padding of each row."""

    index: torch.Tensor
    """Document number of each token (int64, in the shape of the targets)."""
    count: int
    """Number of documents, the same on all ranks that share the rows."""
    group: Any = None
    """Process group of the ranks that share the rows. None: this rank has whole rows."""

    @classmethod
    def of(cls, positions: torch.Tensor) -> Documents:
        """Number the documents of packed rows. `positions` [rows, seq_len] restart at 0 with each document."""
        index = (positions == 0).flatten().cumsum(0) - 1
        return cls(index.view(positions.shape), int(index[-1]) + 1)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average values [trained tokens] over each token's document, without gradient. Returns [trained tokens].

        A collective of the ranks that share the rows, including those without trained tokens.
        """
        with torch.no_grad():
            both = torch.stack([values, torch.ones_like(values)])
            sums = both.new_zeros(2, self.count).index_add_(1, self.index, both)
            if self.group is not None:
                dist.all_reduce(sums, group=self.group)
            total, tokens = sums[:, self.index]
            return total / tokens

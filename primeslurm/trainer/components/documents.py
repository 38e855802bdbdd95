"""Which trained tokens belong to the same sequence, in packed rows that context-parallel ranks may share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Documents:
    """The documents of a micro batch: the sequences that its rows are packed from, and the padding of each row."""

    index: torch.Tensor
    """int64, of the shape of the targets: the number of each token's document."""
    count: int
    """How many there are, the same on all ranks that share the rows."""
    group: Any = None
    """Process group of the ranks that share the rows. None: this rank has them alone."""

    @classmethod
    def of(cls, positions: torch.Tensor) -> Documents:
        """Number the documents of packed rows [rows, seq_len], whose positions restart at 0 with each."""
        index = (positions == 0).flatten().cumsum(0) - 1
        return cls(index.view(positions.shape), int(index[-1]) + 1)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the trained tokens of each token's document, wherever they are.

        All ranks that share the rows call it together, whether they have trained tokens or not.

        Args:
            values: [trained tokens], in the order of `index`. No gradient flows back to them.

        Returns:
            [trained tokens].
        """
        with torch.no_grad():
            both = torch.stack([values, torch.ones_like(values)])
            sums = both.new_zeros(2, self.count).index_add_(1, self.index, both)
            if self.group is not None:
                dist.all_reduce(sums, group=self.group)
            total, tokens = sums[:, self.index]
            return total / tokens

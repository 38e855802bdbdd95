from __future__ import annotations

import torch


def inverted(owner: torch.Tensor, rows: int, slots: int) -> torch.Tensor:
    """Return `where` [rows, slots] for an `owner` [n], computed slowly."""
    where = owner.new_full((rows * slots,), -1)
    return where.scatter_(0, owner, torch.arange(owner.shape[0], device=owner.device)).view(rows, slots)

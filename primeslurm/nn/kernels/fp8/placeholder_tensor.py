"""Tensors without memory: they have shape, dtype and gradients as any other, and stand for numbers in another form.

Autograd wants a weight and its gradient to be of one dtype. A weight that is there in FP8 alone goes through it as such
a tensor, of the dtype of compute, and products look up what it stands for. Views of it are hollow, too, so layers may
transpose it and pass it on. Whoever reads one fails: its address is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_behind: dict[int, tuple[StorageWeakRef, Any]] = {}
"""By the address of the hollow tensor's storage, which a weak reference keeps from being another one's."""


def stand_in(numbers: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a contiguous tensor that stands for `numbers`."""
    for address in [address for address, (storage, _) in _behind.items() if storage.expired()]:
        del _behind[address]
    size = math.prod(shape) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(0, device, size)
    known = StorageWeakRef(storage)
    _behind[known.cdata] = known, numbers
    return torch.empty(0, dtype=dtype, device=device).set_(storage).view(shape)


def behind(tensor: torch.Tensor) -> Any | None:
    """Return what a tensor, or the tensor that it is a view of, stands for; None if it is an ordinary one."""
    known = _behind.get(tensor.untyped_storage()._cdata)
    return None if known is None or known[0].expired() else known[1]

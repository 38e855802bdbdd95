"""Placeholder tensors: without memory, with the shape, dtype and gradient of a tensor that exists in another form.

Autograd requires a weight and its gradient to have the same dtype. A weight that exists in FP8 only is passed through
autograd as a placeholder in the compute dtype, and products look up the FP8 data. Views of a placeholder are
placeholders, too, so layers may transpose it. Reading one fails, because its address is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# Contents by address of the placeholder's storage object. The weak reference keeps the address from being reused.
_contents: dict[int, tuple[StorageWeakRef, Any]] = {}


def create(contents: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Create a contiguous placeholder tensor, for which `lookup` returns `contents`."""
    for address in [address for address, (storage, _) in _contents.items() if storage.expired()]:
        del _contents[address]
    size = math.prod(shape) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(0, device, size)
    reference = StorageWeakRef(storage)
    _contents[reference.cdata] = reference, contents
    return torch.empty(0, dtype=dtype, device=device).set_(storage).view(shape)


def lookup(tensor: torch.Tensor) -> Any | None:
    """Return the contents of a placeholder or of a view of one. None for an ordinary tensor."""
    entry = _contents.get(tensor.untyped_storage()._cdata)
    return None if entry is None or entry[0].expired() else entry[1]

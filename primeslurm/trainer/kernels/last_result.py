"""What was last made of a tensor, for all who ask for it: projections of one input share its quantised form.

A tensor is known by its storage, view and version, as activation checkpointing hands each consumer a view of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class LastResult(Generic[T]):
    """Remembers one result, and the tensor that it was made of without keeping that tensor alive."""

    def __init__(self) -> None:
        self._storage: StorageWeakRef | None = None
        self._key: tuple[object, ...] = ()
        self._result: T | None = None

    def of(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], T]) -> T:
        """Return what `make` makes of the tensor, without making it anew for the same values."""
        if os.environ.get("PRIMESLURM_FP8_SHARE", "1") == "0":
            return make(tensor)
        storage = StorageWeakRef(tensor.untyped_storage())
        # The weak reference keeps the address of the storage from being used again.
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if self._result is None or key != self._key:
            self._storage, self._key, self._result = storage, key, make(tensor)
        return self._result

"""A one-entry cache of a tensor's quantized form, so that projections with the same input quantize it once.

Tensors are identified by storage, view and version, because activation checkpointing passes each consumer a new view.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class QuantizedCache(Generic[T]):
    """Caches the last result. A call on any cache also drops the results of all caches whose tensors are gone."""

    _all: ClassVar[weakref.WeakSet[QuantizedCache[Any]]] = weakref.WeakSet()

    def __init__(self) -> None:
        QuantizedCache._all.add(self)
        self._storage: StorageWeakRef | None = None
        self._key: tuple[Any, ...] = ()
        self._context: object = None
        self._result: T | None = None

    def of(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], T], context: object = None) -> T:
        """Return `make(tensor)`, from the cache if the tensor and the context are those of the last call.

        Args:
            tensor: The tensor. Inference tensors are not supported, because they have no version.
            make: The same function in every call on this cache.
            context: Another object that the result depends on, compared by identity.
        """
        for other in QuantizedCache._all:
            other._drop_expired()
        storage = StorageWeakRef(tensor.untyped_storage())
        # The weak reference, which is kept, prevents the address from being reused for another storage.
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if self._result is None or key != self._key or context is not self._context:
            self._result = None  # may be large, so free it first
            self._result = make(tensor)
            self._storage, self._key, self._context = storage, key, context
        return self._result

    def _drop_expired(self) -> None:
        if self._storage is not None and self._storage.expired():
            self._storage, self._key, self._context, self._result = None, (), None, None

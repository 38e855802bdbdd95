"""What was last made of a tensor, for all who ask for it: projections of one input share its quantised form.

Tensors are known by storage, view and version: activation checkpointing hands each consumer a view of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class QuantizedCache(Generic[T]):
    """Remembers one result until it makes another one.

    Once the tensor is gone that it was made of, nobody can ask for it again: whoever asks for anything lets it go.
    """

    _all: ClassVar[weakref.WeakSet[QuantizedCache[Any]]] = weakref.WeakSet()

    def __init__(self) -> None:
        QuantizedCache._all.add(self)
        self._storage: StorageWeakRef | None = None
        self._key: tuple[Any, ...] = ()
        self._beside: object = None
        self._result: T | None = None

    def of(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], T], beside: object = None) -> T:
        """Return what `make` makes of a tensor, but not anew if the tensor is the same as the last time.

        Args:
            tensor: not an inference tensor, as these have no versions.
            make: the same function at every call, but for what is `beside`.
            beside: what else the result depends on; known by its identity.
        """
        for other in QuantizedCache._all:
            other._forget_gone()
        storage = StorageWeakRef(tensor.untyped_storage())
        # Kept, it keeps the address from being used for another storage.
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if self._result is None or key != self._key or beside is not self._beside:
            self._result = None  # may be large: let it go before the next one is made
            self._result = make(tensor)
            self._storage, self._key, self._beside = storage, key, beside
        return self._result

    def _forget_gone(self) -> None:
        if self._storage is not None and self._storage.expired():
            self._storage, self._key, self._beside, self._result = None, (), None, None

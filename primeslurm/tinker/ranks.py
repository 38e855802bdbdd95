"""The ranks of a service with several GPUs: rank 0 serves, and the others execute what it announces."""

from __future__ import annotations

import itertools
import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.distributed.world import World
from primeslurm.wire import exit_codes

log = logging.getLogger(__name__)
# Seconds between two heartbeats of a rank that waits for rank 0.
_HEARTBEAT = timedelta(seconds=10)
_CALLS = itertools.count()
"""Numbers of calls, the same on all ranks."""


class SharedCalls:
    """Executes methods of `target` on all ranks, in the same order."""

    def __init__(self, world: World, target: Any) -> None:
        self.world, self._target = world, target

    def execute(self, method: str, *arguments: Any) -> Any:
        """Call a method on all ranks with the same arguments, which are pickled. Return rank 0's result.

        If there are several ranks, an error ends this process: the other ranks may wait in a collective that this rank
        never joins, so that all of them must restart.
        """
        if self.world.size == 1:
            return getattr(self._target, method)(*arguments)
        try:
            self._announce(method, *arguments)
            return getattr(self._target, method)(*arguments)
        except Exception as error:
            log.exception("error: rank 0 failed in a pass, and all ranks restart: %s", error)
            os._exit(exit_codes.FAILED)  # from the thread of the model, while others serve HTTP

    def close(self) -> None:
        """End `follow` on the other ranks."""
        if self.world.size > 1:
            self._announce("")

    def _announce(self, *call: Any) -> None:
        # The other ranks wait for a key, because waiting in a collective would have a timeout and no heartbeats.
        key = _key()
        self._store.set(key, "")
        self.world.share(call)
        self.world.barrier()  # all have seen the key
        self._store.delete_key(key)

    def follow(self) -> None:
        """Execute the calls of rank 0 until it closes. Raises an error if a call fails or rank 0 is gone."""
        while True:
            key = _key()
            while not self._announced(key):
                liveness().heartbeat()
            liveness().enter("pass")
            call: tuple[Any, ...] = self.world.share(())
            self.world.barrier()
            method, *arguments = call
            if not method:
                return
            getattr(self._target, method)(*arguments)

    def _announced(self, key: str) -> bool:
        try:
            self._store.wait([key], _HEARTBEAT)
        except dist.DistStoreError:  # on a timeout only: a lost connection is a DistNetworkError
            return False
        return True

    @property
    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's values to all ranks."""
        if self.world.size > 1:
            dist.broadcast(tensor, src=0)

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace rank 0's values by the sums over all ranks. Those of other ranks become undefined."""
        if self.world.size > 1:
            dist.reduce(tensor, dst=0)

    def collect(self, value: Any) -> list[Any]:
        return [value] if self.world.size == 1 else self.world.collect(value)


def _key() -> str:
    return f"call/{next(_CALLS)}"

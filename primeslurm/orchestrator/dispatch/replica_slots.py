"""Which replica each rollout runs on, and which of them has room for another. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping


class ReplicaSlots:
    """Rollouts by replica, and how many each may have.

    Args:
        routers: of the replicas.
    """

    def __init__(self, routers: Iterable[str]) -> None:
        self.load: dict[str, int] = dict.fromkeys(routers, 0)
        """Rollouts that run, by router."""
        self.ended: Counter[str] = Counter()
        """Rollouts that are over, by router."""
        self.shares: Mapping[str, int] = {}
        """Rollouts that may run at once, by router; empty: replicas have no bounds of their own."""
        self._router_of: dict[str, str] = {}

    @property
    def routers(self) -> list[str]:
        """Return the routers of all replicas."""
        return list(self.load)

    @property
    def with_free_slots(self) -> set[str]:
        """Return the routers of the replicas that may get another rollout."""
        return {router for router in self.load if self._room(router) > 0}

    def least_loaded(self) -> str:
        """Return the replica with the most room; of those without bounds, the one with the fewest rollouts."""
        return min(self.load, key=lambda router: (-self._room(router), self.load[router]))

    def begin(self, job: str, wanted: str) -> str:
        """Find a rollout its replica.

        Args:
            job: the rollout's.
            wanted: the replica that has its prompt; it gets the rollout if it has room.
        """
        router = wanted if self._room(wanted) > 0 else self.least_loaded()
        self.adopt(job, router)
        return router

    def adopt(self, job: str, router: str) -> None:
        """Note that a rollout runs on a replica, whether that has room or not."""
        self._router_of[job] = router
        self.load[router] += 1

    def end(self, job: str) -> None:
        """Note that a rollout is over, or does not run any more."""
        router = self._router_of.pop(job)
        if router in self.load:
            self.load[router] -= 1
            self.ended[router] += 1

    def drop(self, router: str) -> list[str]:
        """Do without a replica.

        Returns:
            The rollouts that ran on it.
        """
        del self.load[router]
        return sorted(job for job, where in self._router_of.items() if where == router)

    def _room(self, router: str) -> float:
        return self.shares.get(router, 0) - self.load[router] if self.shares else math.inf

"""Which replica each rollout runs on, and how many slots each replica has left. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping


class ReplicaSlots:
    """Rollouts per replica, against the limit of each. A replica is named by its router."""

    def __init__(self, routers: Iterable[str]) -> None:
        # Rollouts in flight
        self.load: dict[str, int] = dict.fromkeys(routers, 0)
        # Rollouts that have ended
        self.ended: Counter[str] = Counter()
        # Largest load. Empty: replicas have no limit of their own.
        self.limits: Mapping[str, int] = {}
        self._router_of: dict[str, str] = {}

    @property
    def routers(self) -> list[str]:
        return list(self.load)

    @property
    def with_free_slots(self) -> set[str]:
        return {router for router in self.load if self._free(router) > 0}

    def least_loaded(self) -> str:
        """Return the replica with the most free slots; without limits, the one with the fewest rollouts."""
        return min(self.load, key=lambda router: (-self._free(router), self.load[router]))

    def assign(self, job: str, preferred: str) -> str:
        """Assign a job to its preferred replica if that has a free slot, else to the least loaded one."""
        router = preferred if self._free(preferred) > 0 else self.least_loaded()
        self.add(job, router)
        return router

    def add(self, job: str, router: str) -> None:
        """Count a job that already runs on a replica."""
        self._router_of[job] = router
        self.load[router] += 1

    def release(self, job: str) -> None:
        router = self._router_of.pop(job)
        if router in self.load:
            self.load[router] -= 1
            self.ended[router] += 1

    def drop(self, router: str) -> list[str]:
        """Remove a replica, and return the jobs that ran on it."""
        del self.load[router]
        return sorted(job for job, assigned in self._router_of.items() if assigned == router)

    def _free(self, router: str) -> float:
        return self.limits.get(router, 0) - self.load[router] if self.limits else math.inf

"""How many rollouts are in flight, per replica: engines' metrics go in, shares come out. Pure, but for its clock.

`replica_share` has the rule of one replica. Here is what needs all of them: which engines are whose, what an engine did
since the last look, and which replica is slower than the others. A replica that nothing is known of yet has what
engines begin with: dispatch begins when the first engine has the policy, and others may be minutes late.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import median_high
from types import MappingProxyType

from primeslurm.orchestrator.dispatch.held import Held, Overcommit
from primeslurm.orchestrator.dispatch.replica_samples import ReplicaSample
from primeslurm.orchestrator.dispatch.replica_share import START_PER_ENGINE, ReplicaShare
from primeslurm.orchestrator.telemetry.engine_metrics import COUNTERS, ENGINE, Sample
from primeslurm.records.state import ReplicaLoad

SLOW, LESS = 0.5, 0.8
"""A replica is slow if it gives less than these shares of the median's tokens a second, for each rollout and in all."""
USED = 0.95
"""Share of the bound in use from which on the bound is what keeps rollouts from being more."""
ROLES = ("prefill", "decode", "engine")
"""Of a replica's engines: rollouts do not run on a teacher's."""
MUTE_S = 60.0
"""Rollouts run for so long, and no engine has said a number yet: none will."""


class Concurrency:
    """See the module docstring.

    Args:
        routers: of the replicas, `router-<replica>`.
        engines: names of all that there should be.
        bound: most rollouts in flight, all replicas together.
        clock: tells the time [s].
    """

    def __init__(
        self,
        routers: Iterable[str],
        engines: Iterable[str],
        bound: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routers = {router.rpartition("-")[2]: router for router in routers}
        self._engines = Counter(
            match["replica"] for name in engines if (match := _of_rollouts(name)) and _samples(name)
        )
        """That sample, by replica."""
        self._bound = bound
        self._clock = clock
        self._replicas: dict[str, ReplicaShare] = {}
        self._inflight: dict[str, int] = {}
        self._beside: dict[str, int] = {}
        """Rollouts of an evaluation, by replica."""
        self._held: dict[str, Held] = {}
        self._overcommit: dict[str, Overcommit] = {}
        self._seen: dict[str, tuple[float, Sample]] = {}
        """When each engine answered last, and what."""
        self._looked_at: float | None = None
        self._begun_at: float | None = None
        """When a look found rollouts for the first time."""

    @property
    def shares(self) -> dict[str, int]:
        """Return how many rollouts may be in flight, by router; nothing if engines do not say what they do."""
        if self._is_mute:
            return {}
        known = {replica: share.places for replica, share in self._replicas.items()}
        return {
            router: known.get(replica, START_PER_ENGINE * max(1, self._engines[replica]))
            for replica, router in self._routers.items()
        }

    @property
    def _is_mute(self) -> bool:
        if self._seen or self._begun_at is None or self._looked_at is None:
            return False
        return self._looked_at - self._begun_at >= MUTE_S

    @property
    def report(self) -> dict[str, ReplicaLoad]:
        """Return the same by replica, with what keeps it from being more."""
        bound = sum(self._inflight.values()) >= USED * self._bound
        return {
            replica: ReplicaLoad(
                share.places,
                self._inflight.get(replica, 0),
                "bound" if bound and share.limit in ("demand", "growing") else share.limit,
            )
            for replica, share in self._replicas.items()
        }

    def drop(self, router: str) -> None:
        """Do without a replica that is gone."""
        replica = router.rpartition("-")[2]
        self._routers.pop(replica, None)
        self._replicas.pop(replica, None)
        self._inflight.pop(replica, None)
        self._beside.pop(replica, None)
        self._held.pop(replica, None)
        self._overcommit.pop(replica, None)

    def look(
        self,
        samples: Mapping[str, Sample],
        inflight: Mapping[str, int],
        ended: Mapping[str, int],
        beside: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Take in one look at all engines.

        Args:
            samples: by engine; those that are missing did not answer.
            inflight: rollouts that run, by router.
            ended: rollouts that are over, by router.
            beside: rollouts of an evaluation that run on the same engines, by router.
        """
        now = self._clock()
        by_replica: dict[str, dict[str, Sample]] = {}
        for name, sample in samples.items():
            if match := _of_rollouts(name):
                by_replica.setdefault(match["replica"], {})[name] = sample
        for replica, router in self._routers.items():
            self._inflight[replica] = inflight.get(router, 0)
            self._beside[replica] = beside.get(router, 0)
            self._look(replica, by_replica.get(replica, {}), now, ended.get(router, 0))
        self._compare()
        self._seen |= {name: (now, sample) for name, sample in samples.items()}
        self._looked_at = now
        if self._begun_at is None and any(self._inflight.values()):
            self._begun_at = now

    def _look(self, replica: str, samples: Mapping[str, Sample], now: float, ended: int) -> None:
        sampling = {name for name in samples if _samples(name)}
        share = self._replicas.get(replica)
        if share is None:
            if sampling:
                self._held[replica] = Held(self._held.values())
                self._overcommit[replica] = Overcommit(self._overcommit.values())
                self._replicas[replica] = ReplicaShare(len(sampling), self._held[replica], self._overcommit[replica])
            return
        share.engines_are(len(sampling), sum(self._is_fresh(name, samples[name]) for name in sampling))
        if not sampling or any(self._is_fresh(name, sample) for name, sample in samples.items()):
            return
        if any(self._seen[name][0] != self._looked_at for name in samples) or self._looked_at is None:
            return  # what happened since it answered last is no rate of now
        before = [self._seen[name][1] for name in samples]
        grown = {name: _sum(samples.values(), name) - _sum(before, name) for name in COUNTERS}
        at_decode = [samples[name] for name in sampling]
        look = ReplicaSample(
            seconds=now - self._looked_at,
            inflight=self._inflight[replica],
            beside=self._beside[replica],
            ended=ended,
            running=_sum(at_decode, "running"),
            waiting=_sum(at_decode, "waiting") - _sum(at_decode, "waiting_deferred"),
            prefill_waiting=_sum(samples.values(), "waiting") - _sum(at_decode, "waiting"),
            kv=_sum(at_decode, "kv_usage") / len(at_decode),
            generated=grown["generated"],
            computed=grown["computed"],
            preempted=grown["preemptions"],
        )
        share.look(look)

    def _is_fresh(self, name: str, sample: Sample) -> bool:
        """Whether an engine was started since it answered last: it counts from zero again."""
        before = self._seen.get(name)
        return before is None or any(sample.get(counter, 0.0) < before[1].get(counter, 0.0) for counter in COUNTERS)

    def _compare(self) -> None:
        """Give a replica that is slower than the others, with as much to do, no more than it can do."""
        busy = {name: share for name, share in self._replicas.items() if share.generated_per_s and self._inflight[name]}
        if len(busy) < 2:
            return
        total = median_high(share.generated_per_s for share in busy.values())
        of_each = {
            name: share.generated_per_s / (self._inflight[name] + self._beside[name]) for name, share in busy.items()
        }
        each = median_high(of_each.values())
        for name, share in busy.items():
            speed = of_each[name] / each
            share.slower(speed if speed < SLOW and share.generated_per_s < LESS * total else 1.0)


def _of_rollouts(name: str) -> re.Match[str] | None:
    """The name's parts, if rollouts run on the engine."""
    match = ENGINE.match(name)
    return match if match and match["role"] in ROLES else None


def _samples(name: str) -> bool:
    return not name.startswith("prefill")


def _sum(samples: Iterable[Sample], name: str) -> float:
    return sum(sample.get(name, 0.0) for sample in samples)

"""What the engines of a replica did: between two looks, and between two decisions about its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FEW_BESIDE = 0.05
"""An evaluation's rollouts for each one of training: with more, it may be what preempts and evicts."""


@dataclass(frozen=True)
class ReplicaSample:
    """What the engines of a replica did since the look before."""

    seconds: float
    inflight: float
    """Rollouts of training."""
    beside: float
    """Rollouts of an evaluation: what engines show is of these, too."""
    ended: int
    """Rollouts of training that are over since the run's start."""
    running: float
    """Requests, of engines that sample."""
    waiting: float
    """For room; not those that wait for KV from a prefill engine."""
    prefill_waiting: float
    """At prefill engines, where these are separate."""
    kv: float
    """Used share of the KV cache, mean over the engines that sample."""
    generated: float
    """Tokens sampled."""
    computed: float
    """Tokens of prompts computed."""
    preempted: float
    """Requests."""


class Period:
    """What engines did between two decisions: means over time, sums, and what waited at the least.

    Args:
        looks: of the period, in order; one at least.
    """

    def __init__(self, looks: Sequence[ReplicaSample]) -> None:
        self.seconds = sum(look.seconds for look in looks)
        self.inflight, self.running, self.kv = (self._mean(looks, name) for name in ("inflight", "running", "kv"))
        self.ended = looks[-1].ended
        self.generated = float(sum(look.generated for look in looks))
        self.computed = float(sum(look.computed for look in looks))
        self.preempted = float(sum(look.preempted for look in looks))
        self.least_waiting = min(look.waiting for look in looks)
        self.least_prefill_waiting = min(look.prefill_waiting for look in looks)
        self.least_waiting_anywhere = min(look.waiting + look.prefill_waiting for look in looks)
        self.together = self.inflight + self._mean(looks, "beside")
        self.alone = self.together <= (1 + FEW_BESIDE) * self.inflight
        """What was preempted or evicted is training's own doing."""
        waiting = self._mean(looks, "waiting") + self._mean(looks, "prefill_waiting")
        self.busy = self.running + max(0.0, waiting)
        """Rollouts that ask for something; the others are at their tools."""

    def _mean(self, looks: Sequence[ReplicaSample], name: str) -> float:
        return float(sum(getattr(look, name) * look.seconds for look in looks) / self.seconds)

"""Current state of a process: `state/<process>.json`, replaced continuously."""

from __future__ import annotations

from typing import Literal

import msgspec

from primeslurm.records.evaluation import EvaluationProgress
from primeslurm.records.record import Record


class EngineRecord(msgspec.Struct, frozen=True):
    """State of one engine, as the weight update loop sees it."""

    state: str  # DOWN, STALE, UPDATING or CURRENT
    since: float = 0.0  # begin of this state, in Unix seconds
    version: int | None = None  # policy version that it serves; None while it serves none
    restart: bool = False  # it failed a weight update and must be restarted
    error: str | None = None


class Load(msgspec.Struct, frozen=True):
    """Load of all engines of one role, in the whole run or in one replica.

    Fields ending in `_mean` and `_per_s` cover the last `seconds`. The others are from the newest poll.
    """

    engines: int = 0  # engines that answered
    running: float = 0.0  # requests being processed, summed over engines
    waiting: float = 0.0  # waiting requests, summed over engines: the sum of the next two
    waiting_capacity: float = 0.0  # waiting for room in the batch or the KV cache
    waiting_deferred: float = 0.0  # waiting for something else: a decode engine waits for KV from a prefill engine
    kv_usage: float = 0.0  # used fraction of the KV cache of the fullest engine
    seconds: float = 0.0  # period of means and rates
    running_mean: float = 0.0
    waiting_mean: float = 0.0
    deferred_mean: float = 0.0  # mean of `waiting_deferred`
    kv_usage_mean: float = 0.0  # mean over engines
    busy_mean: float = 0.0  # fraction of polls that found the engine with requests
    generated_per_s: float = 0.0  # sampled tokens
    prompted_per_s: float = 0.0  # prompt tokens of all requests, cached or computed
    computed_per_s: float = 0.0  # prompt tokens that were computed: neither cached nor transferred
    preemptions_per_s: float = 0.0  # requests that lost their KV cache to others and start again
    prefix_hit_rate: float | None = None  # hit rate of the engine's own prefix cache, in tokens; None without look-ups
    external_hit_rate: float | None = None  # hit rate of KV from other engines (NIXL) and offload tiers
    acceptance_rate: float | None = None  # accepted fraction of draft tokens; None without speculative decoding


# The limiting factor of a replica's rollouts.
#
# - demand: there is no more work. growing: it is not known yet whether more fit. bound: `max_inflight_rollouts`.
# - kv: the KV cache is full. queue: requests wait at full engines.
# - prefill: requests wait for prefill while decode has room. cache: more rollouts would evict prompts from the cache.
# - slow: other replicas are twice as fast. lost: no engine answers.
Limit = Literal["demand", "growing", "bound", "kv", "queue", "prefill", "cache", "slow", "lost"]


class ReplicaLoad(msgspec.Struct, frozen=True):
    """Rollouts of one replica, as the concurrency controller sees them."""

    places: int  # slots: rollouts that may be in flight
    inflight: int
    limit: str  # one of `Limit`


class FailedRollouts(msgspec.Struct, frozen=True):
    """Failed rollouts of one environment, those included whose retry succeeded."""

    failed: int
    of_reason: int  # failures with the most frequent reason
    reason: str  # that reason: the last error of its kind
    tasks_given_up: int = 0  # tasks that are skipped from now on


class RolloutProgress(Record, frozen=True):
    """Progress of an RL run, as the orchestrator sees it."""

    step: int | None = None  # last step that the trainer reported
    max_steps: int | None = None
    version: int | None = None  # newest policy version that every serving engine has
    inflight: int = 0  # running rollouts
    ready_groups: int = 0
    ready_rollouts: int = 0
    open_groups: int = 0
    unscored_groups: int = 0  # complete groups that wait for the teacher
    counts: dict[str, int] = {}  # rollouts of this attempt by result
    failures: dict[str, FailedRollouts] = {}  # failed rollouts of this attempt by environment
    environments: list[str] = []  # environments that have a worker
    rollouts_by_node: dict[str, int] = {}  # running rollouts by Plan index of the workers' node
    reward: float | None = None  # mean of the last step's batch
    staleness: float | None = None  # largest in the last step's batch, in policy versions
    tokens_per_s: float = 0.0  # sampled tokens over the last step
    roles: dict[str, Load] = {}  # load by role of the engines
    evaluation: EvaluationProgress | None = None  # None without evaluation


class OrchestratorState(RolloutProgress, frozen=True):
    """`state/orchestrator.json`."""

    failure: str = ""  # why the orchestrator ends early
    complete: bool = False  # the last step is committed, its policy is on the engines, and evaluations have ended
    moved: float = 0.0  # last progress, tokens of engines included, by the orchestrator's monotonic clock
    engines: dict[str, EngineRecord] = {}
    replicas: dict[str, dict[str, Load]] = {}  # load by replica and role
    shares: dict[str, ReplicaLoad] = {}  # by replica; empty with static concurrency, or before an engine has answered

    @property
    def begun(self) -> bool:
        return self.version is not None

    @property
    def marker(self) -> object:
        """A value that changes whenever the run makes progress."""
        evaluated = (self.evaluation.step, self.evaluation.ended) if self.evaluation else None
        return self.step, self.version, self.counts.get("finished"), evaluated, self.moved


class TrainerState(Record, frozen=True):
    """`state/trainer-rank-0.json`."""

    step: int | None = None
    phase: str = ""  # phase since `time`
    seconds: dict[str, float] = {}  # time per phase since the last reported step
    last_seconds: dict[str, float] = {}  # last duration of each phase

    @property
    def version(self) -> None:
        """None: an SFT run has no policy version."""
        return None

    @property
    def begun(self) -> bool:
        return True

    @property
    def marker(self) -> object:
        return self.step

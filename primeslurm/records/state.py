"""The state that a process keeps of itself: `state/<process>.json`, replaced all the time."""

from __future__ import annotations

from typing import Literal

import msgspec

from primeslurm.records.evaluation import EvaluationProgress
from primeslurm.records.record import Record


class EngineRecord(msgspec.Struct, frozen=True):
    """One engine as the policy loop sees it."""

    state: str
    """DOWN, STALE, UPDATING or CURRENT."""
    since: float = 0.0
    """When it entered this state, in Unix seconds."""
    version: int | None = None
    """Policy version that it serves; None while it serves nothing."""
    restart: bool = False
    """It failed an update, and has to be restarted."""
    error: str | None = None


class Load(msgspec.Struct, frozen=True):
    """The load of the engines of one role, of the whole run or of one replica, as the orchestrator sees it.

    `_mean` and `_per_s` are over the last `seconds`; the rest is from the newest look.
    """

    engines: int = 0
    """How many of them answered."""
    running: float = 0.0
    """Requests being worked on, all engines together."""
    waiting: float = 0.0
    """Requests that wait, all engines together."""
    waiting_capacity: float = 0.0
    """Of these: for room in the batch or the KV cache."""
    waiting_deferred: float = 0.0
    """Of these: for something else, on a decode engine for KV from a prefill engine."""
    kv_usage: float = 0.0
    """Used share of the KV cache, 0 to 1, of the fullest engine."""
    seconds: float = 0.0
    """How far back means and rates go."""
    running_mean: float = 0.0
    """Requests being worked on, all engines together."""
    waiting_mean: float = 0.0
    """Requests that wait, all engines together."""
    deferred_mean: float = 0.0
    """Of these: not for room, but for something else."""
    kv_usage_mean: float = 0.0
    """Used share of the KV cache, mean over the engines."""
    busy_mean: float = 0.0
    """Share of the looks at which an engine had anything to do."""
    generated_per_s: float = 0.0
    """Sampled tokens."""
    prompted_per_s: float = 0.0
    """Prompt tokens of all requests, computed or not."""
    computed_per_s: float = 0.0
    """Prompt tokens that had to be computed: neither cached nor handed over."""
    preemptions_per_s: float = 0.0
    """Requests that lost their KV cache to others and start again."""
    prefix_hit_rate: float | None = None
    """Share of the prompt tokens looked up that were in the engine's own cache; None: nothing was looked up."""
    external_hit_rate: float | None = None
    """The same for KV from outside: other engines (NIXL) and offload tiers."""


Limit = Literal["demand", "growing", "bound", "kv", "preemption", "queue", "prefill", "cache", "slow", "lost"]
"""What keeps a replica's rollouts from being more. demand: there are no more to run. growing: whether more fit is not
known yet. bound: `max_inflight_rollouts`. kv: the KV cache. preemption: the same, after requests were preempted. queue:
requests wait at engines that are full. prefill: requests wait for prefill, while decode has room. cache: prompts would
be computed anew. slow: other replicas are twice as fast. lost: no engine answers."""


class ReplicaLoad(msgspec.Struct, frozen=True):
    """The rollouts of one replica, as the concurrency controller has it."""

    places: int
    """Rollouts that may be in flight."""
    inflight: int
    limit: str
    """One of `Limit`."""


class FailedRollouts(msgspec.Struct, frozen=True):
    """The rollouts of one environment that failed, tries that were repeated with success included."""

    failed: int
    of_reason: int
    """How many of them failed for the most frequent reason."""
    reason: str
    """That reason in words: the last error of its kind."""
    tasks_given_up: int = 0
    """Tasks that are left out."""


class RolloutProgress(Record, frozen=True):
    """How far an RL run is, in the orchestrator's words."""

    step: int | None = None
    """Last step that the trainer reported."""
    max_steps: int | None = None
    version: int | None = None
    """Newest policy that every serving engine has."""
    inflight: int = 0
    """Rollouts that run."""
    ready_groups: int = 0
    ready_rollouts: int = 0
    open_groups: int = 0
    unscored_groups: int = 0
    """Complete groups that are at the teacher."""
    counts: dict[str, int] = {}
    """Rollouts of this attempt by what became of them."""
    failures: dict[str, FailedRollouts] = {}
    """Rollouts of this attempt that failed, by environment."""
    environments: list[str] = []
    """Those that have a worker."""
    rollouts_by_node: dict[str, int] = {}
    """Rollouts that run, by index in the plan of the node that their workers are on."""
    reward: float | None = None
    """Mean of the last step's batch."""
    staleness: float | None = None
    """Largest of the last step's batch, in policy versions."""
    tokens_per_s: float = 0.0
    """Sampled, over the last step."""
    roles: dict[str, Load] = {}
    """Load by role of the engines."""
    evaluation: EvaluationProgress | None = None
    """None without evaluation."""


class OrchestratorState(RolloutProgress, frozen=True):
    """`state/orchestrator.json`."""

    failure: str = ""
    """Why the orchestrator ends before its work is done, once it does."""
    moved: float = 0.0
    """When the orchestrator last saw the run get on, in seconds of its own clock: also by tokens of engines."""
    engines: dict[str, EngineRecord] = {}
    replicas: dict[str, dict[str, Load]] = {}
    """Load by replica and role."""
    shares: dict[str, ReplicaLoad] = {}
    """By replica; empty with `orchestrator.concurrency: static`, and as long as no engine has answered."""

    @property
    def begun(self) -> bool:
        """Whether engines have served a policy."""
        return self.version is not None

    @property
    def marker(self) -> object:
        """A value that changes whenever the run gets on."""
        evaluated = (self.evaluation.step, self.evaluation.ended) if self.evaluation else None
        return self.step, self.version, self.counts.get("finished"), evaluated, self.moved


class TrainerState(Record, frozen=True):
    """`state/trainer-rank-0.json`."""

    step: int | None = None
    phase: str = ""
    """What it does since `time`."""
    seconds: dict[str, float] = {}
    """Time by phase since the last step was reported."""
    last_seconds: dict[str, float] = {}
    """Time that each phase took last."""

    @property
    def version(self) -> None:
        """No engine serves a policy that is trained without an orchestrator."""
        return None

    @property
    def begun(self) -> bool:
        """Whether it trains: it does since it has a state."""
        return True

    @property
    def marker(self) -> object:
        """A value that changes whenever the run gets on."""
        return self.step

"""The state that a process keeps of itself: `state/<process>.json`, replaced all the time."""

from __future__ import annotations

import msgspec

from primeslurm.records.base import Record
from primeslurm.records.load import Load


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
    environments: list[str] = []
    """Those that have a worker."""
    reward: float | None = None
    """Mean of the last step's batch."""
    staleness: float | None = None
    """Largest of the last step's batch, in policy versions."""
    tokens_per_s: float = 0.0
    """Sampled, over the last step."""
    roles: dict[str, Load] = {}
    """Load by role of the engines."""


class OrchestratorState(RolloutProgress, frozen=True):
    """`state/orchestrator.json`."""

    engines: dict[str, EngineRecord] = {}
    replicas: dict[str, dict[str, Load]] = {}
    """Load by replica and role."""

    @property
    def begun(self) -> bool:
        """Whether engines have served a policy."""
        return self.version is not None

    @property
    def marker(self) -> object:
        """A value that changes whenever the run gets on."""
        return self.step, self.version, self.counts.get("finished")


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

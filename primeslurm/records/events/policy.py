"""Events of engines on their way from one policy version to the next, told by the orchestrator."""

from __future__ import annotations

from primeslurm.records.record import Event


class PolicyWanted(Event, frozen=True, tag="policy_wanted"):
    """A policy was published; engines have to take it."""

    version: int
    path: str = ""
    """Its files; empty if the trainer sends it."""


class PolicyCurrent(Event, frozen=True, tag="policy_current"):
    """Every serving engine has acknowledged a policy."""

    version: int


class EngineStateChanged(Event, frozen=True, tag="engine_state"):
    """An engine is DOWN, STALE, UPDATING or CURRENT, and was something else before."""

    engine: str
    state: str
    before: str = ""
    reason: str = ""
    """Why it is DOWN."""


class EngineUnresponsive(Event, frozen=True, tag="engine_silent"):
    """An engine did not answer a look in time, for the first time since its last answer. It is not down for that."""

    engine: str
    error: str = ""
    silent: int = 0
    """So many engines did not, it among them,"""
    engines: int = 0
    """of so many."""


class EventLoopDelayed(Event, frozen=True, tag="loop_stood_still"):
    """The orchestrator had no turn for a while: its machine had none to give. Who was silent meanwhile is not late."""

    seconds: float


class EngineUpdated(Event, frozen=True, tag="engine_updated", omit_defaults=True):
    """An engine acknowledged a policy."""

    engine: str
    version: int
    by: str = ""
    """What it took to get there: see `orchestrator.weight_transfer.engine_client.Step`."""
    seconds: float | None = None
    """All in all; of these:"""
    wait_s: float | None = None
    load_s: float | None = None
    pause_s: float | None = None


class EngineUpdateFailed(Event, frozen=True, tag="engine_update_failed"):
    """An engine could not take a policy, and has to be restarted."""

    engine: str
    version: int | None = None
    error: str = ""


class EngineLost(Event, frozen=True, tag="engine_lost"):
    """An engine went away while it was given a policy."""

    engine: str
    version: int | None = None
    error: str = ""


class EngineAnswersDamaged(Event, frozen=True, tag="engine_answers_damaged"):
    """An engine gives answers that cannot be used, and has to be restarted."""

    engine: str
    damaged: int = 0
    answers: int = 0
    """Its last answers, of which so many were damaged."""
    error: str = ""
    """What was wrong with the last one."""


class EngineRestarted(Event, frozen=True, tag="engine_restart"):
    """An engine that failed an update, or gave damaged answers, was told to end; its agent starts it again."""

    engine: str
    reason: str = ""
    """Empty: it failed an update."""


class EngineGivenUp(Event, frozen=True, tag="engine_given_up"):
    """The policy loop does without an engine from now on."""

    engine: str


PolicyEvent = (
    PolicyWanted
    | PolicyCurrent
    | EngineStateChanged
    | EngineUnresponsive
    | EventLoopDelayed
    | EngineUpdated
    | EngineUpdateFailed
    | EngineLost
    | EngineAnswersDamaged
    | EngineRestarted
    | EngineGivenUp
)

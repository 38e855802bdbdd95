"""Events of weight updates on engines, written by the orchestrator."""

from __future__ import annotations

from primeslurm.records.record import Event


class PolicyWanted(Event, frozen=True, tag="policy_wanted"):
    """A policy was published. Engines have to load it."""

    version: int
    path: str = ""  # its files; empty if the trainer sends the weights


class PolicyCurrent(Event, frozen=True, tag="policy_current"):
    """Every serving engine has acknowledged a policy."""

    version: int


class EngineStateChanged(Event, frozen=True, tag="engine_state"):
    """An engine changed between DOWN, STALE, UPDATING and CURRENT."""

    engine: str
    state: str
    before: str = ""
    reason: str = ""  # why it is DOWN


class EngineUnresponsive(Event, frozen=True, tag="engine_silent"):
    """An engine did not answer a poll, for the first time since its last answer. It does not count as down yet."""

    engine: str
    error: str = ""
    silent: int = 0  # engines that did not answer
    engines: int = 0  # polled engines


class EventLoopDelayed(Event, frozen=True, tag="loop_stood_still"):
    """The orchestrator's event loop did not run for a while. Engines are not blamed for that time."""

    seconds: float


class EngineUpdated(Event, frozen=True, tag="engine_updated", omit_defaults=True):
    """An engine acknowledged a policy."""

    engine: str
    version: int
    by: str = ""  # how: see `orchestrator.weight_updates.engine_client.Step`
    seconds: float | None = None  # total; the next fields are its parts
    wait_s: float | None = None
    load_s: float | None = None
    pause_s: float | None = None


class EngineUpdateFailed(Event, frozen=True, tag="engine_update_failed"):
    """A weight update failed, and the engine must be restarted."""

    engine: str
    version: int | None = None
    error: str = ""


class EngineLost(Event, frozen=True, tag="engine_lost"):
    """An engine disappeared during a weight update."""

    engine: str
    version: int | None = None
    error: str = ""


class EngineAnswersDamaged(Event, frozen=True, tag="engine_answers_damaged"):
    """An engine returns invalid answers and must be restarted."""

    engine: str
    damaged: int = 0  # invalid answers among the last `answers`
    answers: int = 0
    error: str = ""  # fault of the last one


class EngineRestarted(Event, frozen=True, tag="engine_restart"):
    """An engine was told to exit, so that its agent restarts it."""

    engine: str
    reason: str = ""  # empty after a failed weight update


class EngineGivenUp(Event, frozen=True, tag="engine_given_up"):
    """The weight update loop ignores an engine from now on."""

    engine: str

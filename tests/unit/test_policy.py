"""What the policy loop decides, with an injected clock and no I/O."""

from __future__ import annotations

import pytest

from primeslurm.orchestrator.engines import EngineStatus, Policy, Step, next_step
from primeslurm.orchestrator.policy import Fleet


def engine(version: int | None, incarnation: str = "i", paused: bool = False, updates: int = 1) -> EngineStatus:
    return EngineStatus(version, incarnation, paused, updates, initialized=True)


V0, V1, V2 = Policy(0, "/model"), Policy(1, "/run/v1"), Policy(2, "/run/v2")


@pytest.mark.parametrize(
    ("status", "policy", "step"),
    [
        (engine(1), V1, Step.NOTHING),
        (engine(1, paused=True), V1, Step.RESUME),
        (engine(None, updates=0), V0, Step.CONFIRM),
        (engine(None, updates=0), Policy(5, "/model"), Step.CONFIRM),  # started from the policy's own directory
        (engine(None, updates=0), V1, Step.UPDATE),
        (engine(None, updates=1), V0, Step.UPDATE),  # a failed update: what it loaded at start is gone
        (engine(1), V2, Step.UPDATE),
        (engine(2), V1, Step.UPDATE),
    ],
)
def test_next_step(status: EngineStatus, policy: Policy, step: Step) -> None:
    assert next_step(status, policy, "/model") is step


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    return Fleet(["a", "b"], clock)


def states(fleet: Fleet) -> dict[str, str]:
    return {name: view.state for name, view in fleet.report().items()}


def test_nothing_is_current_before_an_engine_serves(fleet: Fleet) -> None:
    fleet.want(V0)
    assert fleet.current_version is None
    fleet.seen("a", engine(None, updates=0))
    assert states(fleet) == {"a": "STALE", "b": "DOWN"}
    assert fleet.needs_update("a") and not fleet.needs_update("b")
    assert fleet.current_version is None


def test_no_engine_needs_an_update_while_nothing_is_wanted(fleet: Fleet) -> None:
    fleet.seen("a", engine(None, updates=0))
    assert not fleet.needs_update("a")


def test_a_version_is_current_once_every_serving_engine_has_it(fleet: Fleet) -> None:
    fleet.want(V1)
    fleet.seen("a", engine(1))
    fleet.seen("b", engine(1))
    assert fleet.current_version == 1 and states(fleet) == {"a": "CURRENT", "b": "CURRENT"}
    fleet.want(V2)
    assert fleet.needs_update("a") and fleet.needs_update("b")
    fleet.updating("a")
    fleet.updated("a", 2)
    assert fleet.current_version == 1  # b still serves 1
    fleet.updating("b")
    assert states(fleet) == {"a": "CURRENT", "b": "UPDATING"}
    fleet.updated("b", 2)
    assert fleet.current_version == 2


def test_a_dead_engine_holds_up_nobody_and_is_brought_back_by_itself(fleet: Fleet) -> None:
    fleet.want(V1)
    fleet.seen("a", engine(1))
    fleet.seen("b", engine(1))
    fleet.want(V2)
    fleet.seen("b", None)
    fleet.updated("a", 2)
    assert fleet.current_version == 2
    fleet.seen("b", engine(None, incarnation="j", updates=0))
    assert fleet.needs_update("b")
    assert fleet.current_version == 2


def test_the_current_version_stays_when_all_engines_are_gone(fleet: Fleet) -> None:
    fleet.want(V1)
    fleet.seen("a", engine(1))
    fleet.seen("a", None)
    assert fleet.current_version == 1
    fleet.seen("b", engine(0))  # it was unreachable, and comes back with what it had
    assert fleet.current_version == 1 and fleet.needs_update("b")


def test_an_engine_that_failed_an_update_is_restarted_not_updated(fleet: Fleet) -> None:
    fleet.want(V1)
    fleet.seen("a", engine(0, incarnation="bad"))
    fleet.failed("a", "500")
    fleet.seen("a", engine(None, incarnation="bad", paused=True))
    assert fleet.must_restart("a") and not fleet.needs_update("a")
    assert fleet.report()["a"].restart and fleet.report()["a"].error == "500"
    fleet.seen("a", None)
    assert not fleet.must_restart("a")
    fleet.seen("a", engine(None, incarnation="new", updates=0))
    assert fleet.needs_update("a") and fleet.report()["a"].error is None


def test_a_version_that_was_overtaken_under_way_leaves_the_engine_stale(fleet: Fleet) -> None:
    fleet.want(V1)
    fleet.seen("a", engine(0))
    fleet.updating("a")
    fleet.want(V2)
    fleet.updated("a", 1)
    assert states(fleet)["a"] == "STALE" and fleet.needs_update("a")


def test_a_paused_engine_is_not_current(fleet: Fleet) -> None:
    fleet.want(V1)
    fleet.seen("a", engine(1, paused=True))
    assert fleet.needs_update("a")


def test_an_older_policy_is_refused(fleet: Fleet) -> None:
    fleet.want(V2)
    with pytest.raises(ValueError, match="older"):
        fleet.want(V1)


def test_states_keep_the_time_they_were_entered(fleet: Fleet, clock: Clock) -> None:
    fleet.want(V1)
    clock.now = 110
    fleet.seen("a", engine(1))
    clock.now = 120
    fleet.seen("a", engine(1))
    assert fleet.report()["a"].since == 110


def test_a_policy_that_is_sent_is_wanted_by_every_engine_that_is_up_and_sound(fleet: Fleet) -> None:
    sent = Policy(1, "")
    fleet.want(V0)
    assert fleet.wanting() == 0, "nobody is up"
    fleet.seen("a", engine(0))
    fleet.seen("b", engine(0))
    fleet.want(sent)
    assert fleet.wanting() == 2 and fleet.needs_weights("a")
    fleet.updating("a")
    fleet.failed("b", "refused")
    assert fleet.wanting() == 1, "b has to be restarted first"
    fleet.held("a")
    assert states(fleet)["a"] == "STALE" and fleet.needs_update("a"), "it waits for the trainer to send"
    fleet.seen("a", engine(1, paused=True))
    assert fleet.needs_update("a") and not fleet.needs_weights("a"), "it only has to be resumed"
    fleet.updated("a", 1)
    assert fleet.wanting() == 0

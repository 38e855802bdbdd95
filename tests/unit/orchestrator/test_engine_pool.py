"""Decisions of the engine pool, with a fake clock and no I/O."""

from __future__ import annotations

import pytest

from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion, Step, next_step
from primeslurm.orchestrator.weight_updates.engine_pool import EnginePool
from primeslurm.wire.weight_transfer.messages import EngineStatus
from tests.support.clock import Clock


def engine(version: int | None, incarnation: str = "i", paused: bool = False, updates: int = 1) -> EngineStatus:
    return EngineStatus(version, incarnation, paused, updates, initialized=True)


V0, V1, V2 = PolicyVersion(0, "/model"), PolicyVersion(1, "/run/v1"), PolicyVersion(2, "/run/v2")


@pytest.mark.parametrize(
    ("status", "policy", "adapter", "step"),
    [
        (engine(1), V1, False, Step.NOTHING),
        (engine(1, paused=True), V1, False, Step.RESUME),
        (engine(None, updates=0), V0, False, Step.CONFIRM),
        (engine(None, updates=0), PolicyVersion(5, "/model"), False, Step.CONFIRM),  # started from its directory
        (engine(None, updates=0), V1, False, Step.UPDATE),
        (engine(None, updates=1), V0, False, Step.UPDATE),  # a failed update has overwritten the first weights
        (engine(1), V2, False, Step.UPDATE),
        (engine(2), V1, False, Step.UPDATE),
        (engine(None, updates=0), V0, True, Step.UPDATE),
        (engine(0), V0, True, Step.NOTHING),
    ],
)
def test_next_step(status: EngineStatus, policy: PolicyVersion, adapter: bool, step: Step) -> None:
    assert next_step(status, policy, "/model", adapter) is step


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> EnginePool:
    return EnginePool(["a", "b"], clock, clock)


def states(pool: EnginePool) -> dict[str, str]:
    return {name: view.state for name, view in pool.report().items()}


def test_no_version_is_current_before_an_engine_serves(pool: EnginePool) -> None:
    pool.want(V0)
    assert pool.current_version is None
    pool.seen("a", engine(None, updates=0))
    assert states(pool) == {"a": "STALE", "b": "DOWN"}
    assert pool.needs_update("a") and not pool.needs_update("b")
    assert pool.current_version is None


def test_version_is_current_once_every_serving_engine_has_it(pool: EnginePool) -> None:
    pool.want(V1)
    pool.seen("a", engine(1))
    pool.seen("b", engine(1))
    assert pool.current_version == 1 and states(pool) == {"a": "CURRENT", "b": "CURRENT"}
    pool.want(V2)
    assert pool.needs_update("a") and pool.needs_update("b")
    pool.updating("a")
    pool.updated("a", 2)
    assert pool.current_version == 1  # b still serves 1
    pool.updating("b")
    assert states(pool) == {"a": "CURRENT", "b": "UPDATING"}
    pool.updated("b", 2)
    assert pool.current_version == 2


def test_down_engine_delays_no_other_and_is_updated_when_it_returns(pool: EnginePool) -> None:
    pool.want(V1)
    pool.seen("a", engine(1))
    pool.seen("b", engine(1))
    pool.want(V2)
    pool.seen("b", None)
    pool.updated("a", 2)
    assert pool.current_version == 2
    pool.seen("b", engine(None, incarnation="j", updates=0))
    assert pool.needs_update("b")
    assert pool.current_version == 2


def test_current_version_stays_when_all_engines_are_down(pool: EnginePool) -> None:
    pool.want(V1)
    pool.seen("a", engine(1))
    pool.seen("a", None)
    assert pool.current_version == 1
    pool.seen("b", engine(0))  # it was unreachable, and comes back with what it had
    assert pool.current_version == 1 and pool.needs_update("b")


def test_engine_that_failed_an_update_is_restarted(pool: EnginePool) -> None:
    pool.want(V1)
    pool.seen("a", engine(0, incarnation="bad"))
    pool.failed("a", "500")
    pool.seen("a", engine(None, incarnation="bad", paused=True))
    assert pool.must_restart("a") and not pool.needs_update("a")
    assert pool.report()["a"].restart and pool.report()["a"].error == "500"
    pool.seen("a", None)
    assert not pool.must_restart("a")
    pool.seen("a", engine(None, incarnation="new", updates=0))
    assert pool.needs_update("a") and pool.report()["a"].error is None


def test_engine_updated_to_an_outdated_version_is_stale(pool: EnginePool) -> None:
    pool.want(V1)
    pool.seen("a", engine(0))
    pool.updating("a")
    pool.want(V2)
    pool.updated("a", 1)
    assert states(pool)["a"] == "STALE" and pool.needs_update("a")


def test_older_policy_is_refused(pool: EnginePool) -> None:
    pool.want(V2)
    with pytest.raises(ValueError, match="older"):
        pool.want(V1)


def test_state_keeps_its_start_time(pool: EnginePool, clock: Clock) -> None:
    pool.want(V1)
    clock.now = 110
    pool.seen("a", engine(1))
    clock.now = 120
    pool.seen("a", engine(1))
    assert pool.report()["a"].since == 110


def test_wanting_counts_engines_that_can_be_updated(pool: EnginePool) -> None:
    sent = PolicyVersion(1, "")
    pool.want(V0)
    assert pool.wanting() == 0, "nobody is up"
    pool.seen("a", engine(0))
    pool.seen("b", engine(0))
    pool.want(sent)
    assert pool.wanting() == 2 and pool.needs_weights("a")
    pool.updating("a")
    pool.failed("b", "refused")
    assert pool.wanting() == 1, "b has to be restarted first"
    pool.update_pending("a")
    assert states(pool)["a"] == "STALE" and pool.needs_update("a"), "it waits for the trainer to send"
    pool.seen("a", engine(1, paused=True))
    assert pool.needs_update("a") and not pool.needs_weights("a"), "it only has to be resumed"
    pool.updated("a", 1)
    assert pool.wanting() == 0

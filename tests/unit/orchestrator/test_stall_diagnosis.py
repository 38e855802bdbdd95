"""The suspect of a stall is the first process in the order of dependence."""

from __future__ import annotations

from primeslurm.orchestrator.pipeline.orchestrator import suspect
from primeslurm.records.state import EngineRecord
from tests.unit.orchestrator.test_dispatch import limits, make_dispatcher, run_all
from tests.unit.orchestrator.test_packing import group

CURRENT = EngineRecord("CURRENT")


def test_suspect_is_the_process_that_others_wait_for() -> None:
    dispatch = make_dispatcher(limits())
    engines = {"e0": CURRENT, "e1": CURRENT}
    assert suspect(engines, {"a", "b"}, dispatch, None) == "trainer (requests nothing)"
    assert suspect(engines, {"a", "b"}, dispatch, 3) == "trainer (has the batch of step 3)"
    jobs = run_all(dispatch)
    in_flight = f"{len(jobs)} rollouts in flight, through http://r0, http://r1"
    assert jobs and suspect(engines, {"a", "b"}, dispatch, 3) == in_flight
    assert dispatch.add_unscored(group([1, 1], [0.0, 1.0]))
    assert suspect(engines, {"a", "b"}, dispatch, 3) == "teacher (1 groups wait for its log-probabilities)"
    assert suspect(engines, {"x"}, dispatch, 3) == "no worker of environment a, b"
    late = {"e0": CURRENT, "e1": EngineRecord("DOWN"), "e2": EngineRecord("STALE")}
    assert suspect(late, (), dispatch, 3) == "engines e1 (DOWN), e2 (STALE)"

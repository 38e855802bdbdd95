"""The recovery benchmark computes durations from events."""

from __future__ import annotations

from benchmarks.recovery import engine_recovery, trainer_recovery
from primeslurm.records.events.nodes import AgentStarted, AttemptEnds
from primeslurm.records.events.policy import EngineUpdated
from primeslurm.records.events.processes import ProcessExited, ProcessStarted
from primeslurm.records.events.training import CheckpointLoaded, StepTrained


def test_engine_has_recovered_when_it_serves() -> None:
    steps = [StepTrained(number, time=90.0 + 2 * number) for number in range(1, 8)]  # 92, 94, ... 104
    faults = [
        EngineUpdated("engine-r1-0", 4, time=99.0),
        ProcessExited("engine-r1-0", -9, time=100.5),
        ProcessStarted("engine-r0-0", restarts=1, time=100.6),
        ProcessStarted("engine-r1-0", restarts=1, time=101.0),
        EngineUpdated("engine-r0-0", 5, time=102.0),
    ]
    happened = sorted([*steps, *faults], key=lambda event: event.time)
    assert engine_recovery(happened, "engine-r1-0", 100.2) is None
    recovery = engine_recovery([*happened, EngineUpdated("engine-r1-0", 7, time=109.2)], "engine-r1-0", 100.2)
    assert recovery == {
        **{"exit_seen": 0.3, "started": 0.8, "serves": 9.0},
        **{"steps_meanwhile": 2, "longest_without_step": 5.2, "step_before": 2.0},
    }


def test_trainer_has_recovered_with_its_first_new_step() -> None:
    happened = [
        CheckpointLoaded(0, time=10.0),
        *(EngineUpdated(engine, 4, time=99.0) for engine in ("engine-r0-0", "engine-r1-0")),
        StepTrained(5, time=99.5),
        ProcessExited("trainer-rank-1", -9, time=100.4),
        AttemptEnds("failed", time=101.0),
        AgentStarted(time=103.0),
        AgentStarted(time=104.0),
        CheckpointLoaded(4, time=110.0),
        CheckpointLoaded(4, time=111.0),
        EngineUpdated("engine-r0-0", 4, time=112.0),
        StepTrained(5, time=116.0),  # with rollouts that the previous attempt had finished
        EngineUpdated("engine-r0-0", 5, time=117.0),
    ]
    late, step = EngineUpdated("engine-r1-0", 5, time=118.0), StepTrained(6, time=119.0)
    assert trainer_recovery([*happened, late], "trainer-rank-1", 100.0) is None
    assert trainer_recovery([*happened, step], "trainer-rank-1", 100.0) is None
    assert trainer_recovery([*happened, late, step], "trainer-rank-1", 100.0) == {
        **{"exit_seen": 0.4, "attempt_ends": 1.0, "next_agent": 3.0, "checkpoint_loaded": 11.0},
        **{"engines_serve": 18.0, "first_step": 16.0, "first_new_step": 19.0, "steps_repeated": 1},
    }

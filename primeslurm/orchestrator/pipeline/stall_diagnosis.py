"""Who keeps a run from moving, judged by whom the orchestrator waits for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from primeslurm.orchestrator.dispatch import Dispatcher
from primeslurm.records.state import EngineRecord

Engines = Mapping[str, EngineRecord]
"""`EnginePool.report`: the state of each engine."""


def suspect(engines: Engines, environments: Collection[str], dispatch: Dispatcher, trained_step: int | None) -> str:
    """Name the one that everybody else waits for, in words.

    Args:
        engines: of policies; one that is not current keeps rollouts from starting.
        environments: labels of those that have a worker.
        dispatch: knows which rollouts and groups are under way.
        trained_step: the step whose batch the trainer works on, if it has one.
    """
    late = {name: engine.state for name, engine in engines.items() if engine.state != "CURRENT"}
    if late:
        return "engines " + ", ".join(f"{name} ({state})" for name, state in late.items())
    missing = dispatch.limits.ratios.keys() - environments
    if missing:
        return f"no worker of environment {', '.join(sorted(missing))}"
    if dispatch.unscored:
        return f"teacher ({len(dispatch.unscored)} groups wait for its log-probabilities)"
    if dispatch.inflight:
        return f"{dispatch.inflight} rollouts that are in flight, through {', '.join(dispatch.routers)}"
    if trained_step is not None:
        return f"trainer (has the batch of step {trained_step})"
    return "trainer (asks for nothing)"

"""Names the suspect of a stall: the process that all others wait for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from primeslurm.orchestrator.dispatch import Dispatcher
from primeslurm.records.state import EngineRecord


def suspect(
    engines: Mapping[str, EngineRecord],
    environments: Collection[str],
    dispatcher: Dispatcher,
    trained_step: int | None,
) -> str:
    """Return the suspect in words.

    Args:
        engines: State of each engine; one that is not current keeps rollouts from starting.
        environments: Labels of the environments that have a worker.
        dispatcher: The rollouts and groups in progress.
        trained_step: The step that the trainer works on, if it has a batch.
    """
    late = {name: engine.state for name, engine in engines.items() if engine.state != "CURRENT"}
    if late:
        return "engines " + ", ".join(f"{name} ({state})" for name, state in late.items())
    missing = dispatcher.limits.ratios.keys() - environments
    if missing:
        return f"no worker of environment {', '.join(sorted(missing))}"
    if dispatcher.unscored:
        return f"teacher ({len(dispatcher.unscored)} groups wait for its log-probabilities)"
    if dispatcher.inflight:
        return f"{dispatcher.inflight} rollouts in flight, through {', '.join(dispatcher.routers)}"
    if trained_step is not None:
        return f"trainer (has the batch of step {trained_step})"
    return "trainer (requests nothing)"

"""Collaborators that all stages of the pipeline share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.dispatch import Dispatcher
from primeslurm.orchestrator.evaluation.evaluator import Evaluator
from primeslurm.orchestrator.rollouts.worker_deaths import WorkerDeaths
from primeslurm.orchestrator.telemetry.progress_monitor import ProgressMonitor
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.orchestrator.weight_updates.weight_update_loop import WeightUpdateLoop
from primeslurm.recipe import Recipe
from primeslurm.records.journal import Journal


class Feedback:
    """Messages of later stages to the dispatch stage: jobs to cancel, and that another job may be able to start."""

    def __init__(self) -> None:
        self._cancelled: list[str] = []
        self._changed = asyncio.Event()

    def cancel(self, jobs: Iterable[str]) -> None:
        """Cancel jobs before the next one starts."""
        self._cancelled += jobs

    def wake(self) -> None:
        self._changed.set()

    def take_cancelled(self) -> list[str]:
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    async def wait(self, timeout_s: float) -> None:
        """Return after the next `wake`, or after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()


@dataclass(frozen=True)
class PipelineContext:
    """The state machines, the observers, and the loops that run beside the pipeline."""

    recipe: Recipe
    arguments: OrchestratorArguments
    dispatcher: Dispatcher
    evaluator: Evaluator
    policy: WeightUpdateLoop
    deaths: WorkerDeaths
    monitor: ProgressMonitor
    journal: Journal
    recorder: RolloutRecorder
    feedback: Feedback = field(default_factory=Feedback)

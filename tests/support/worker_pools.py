"""A worker pool that passes its events to functions, for tests that record them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.rollouts.worker_pool import (
    JobKeeper,
    JobLost,
    RolloutEnded,
    WorkerDied,
    WorkerEvent,
    WorkerPool,
    WorkerUnusable,
)
from primeslurm.wire.batches.frames import Frame


class CallbackPool(WorkerPool, JobKeeper):
    """Calls one function per event. `serve` receives until it is cancelled."""

    def __init__(
        self,
        bind: str,
        on_result: Callable[..., object],
        on_lost: Callable[[str], object],
        on_unusable: Callable[[str, int, str], object],
        *,
        on_death: Callable[..., object] = lambda environment, worker, guilty: None,
        claim: Callable[[Job, bool], bool] = lambda job, runs: False,
        keeps: Callable[[str], bool] = lambda job: False,
        **options: Any,
    ) -> None:
        super().__init__(bind, self, **options)
        self.on_result, self.on_lost, self.on_unusable, self.on_death = on_result, on_lost, on_unusable, on_death
        self.claim, self.keeps = claim, keeps

    def adopt_job(self, job: Job, *, runs: bool) -> bool:
        return self.claim(job, runs)

    def holds_result(self, job: str) -> bool:
        return self.keeps(job)

    async def serve(self) -> None:
        try:
            while True:
                await self.receive()
        finally:
            self.close()

    async def _receive(self, identity: bytes, frames: Sequence[Frame]) -> None:
        await super()._receive(identity, frames)
        self._take_events()

    def _take_events(self) -> list[WorkerEvent]:
        events = super()._take_events()
        for event in events:
            match event:
                case RolloutEnded():
                    self.on_result(*event)
                case JobLost():
                    self.on_lost(*event)
                case WorkerUnusable():
                    self.on_unusable(*event)
                case WorkerDied():
                    self.on_death(*event)
        return events

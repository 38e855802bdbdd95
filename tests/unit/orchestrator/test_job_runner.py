"""The worker's end of the job protocol, at an address where another run's orchestrator listens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from primeslurm.orchestrator.rollouts.job_protocol import Job, JobRunner
from primeslurm.wire import secret
from primeslurm.wire.rollouts import Rollout


@pytest.fixture
def address() -> Iterator[str]:
    """Where somebody listens who asks for this process's secret."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        secret.demand(server)
        yield f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
        secret._authenticators.pop(context.underlying).stop()


async def rollout(job: Job) -> tuple[Rollout, ...]:
    raise AssertionError("nobody sends jobs")


async def test_a_worker_that_is_refused_ends(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever: ZMQ does not connect again to who has refused it."""
    monkeypatch.setattr(secret, "own", lambda: "that of another run")
    worker = JobRunner("e", 0, address, rollout)
    await asyncio.sleep(0.5)  # refused before it serves
    with pytest.raises(secret.SecretError, match=f"{address}: another run listens there"):
        await asyncio.wait_for(worker.serve(), 20)


async def test_a_rollout_that_cancels_itself_does_not_count_as_running(address: str) -> None:
    """As happens when a library loses one of its own tasks: the job would be waited for for ever."""

    async def lost(job: Job) -> tuple[Rollout, ...]:
        raise asyncio.CancelledError

    worker = JobRunner("e", 0, address, lost)
    serving = asyncio.create_task(worker.serve())
    worker._handle(Job("j", "g", "e", 0, 0, "router-0", "salt"))
    await asyncio.wait(list(worker._jobs.values()), timeout=20)
    assert not worker._jobs
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_a_worker_that_is_let_in_serves_until_it_is_cancelled(address: str) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(JobRunner("e", 0, address, rollout).serve(), 0.5)

"""Weight updates over NCCL are exact, send each engine only its experts, and succeed after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.support.ports import free_port
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, EngineUpdateError, PolicyVersion, Step
from primeslurm.orchestrator.weight_updates.sessions import TransferSessions
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.weight_senders.collective_sender import Sender
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.link.messages import Answer, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.link.trainer_link import TrainerLink
from primeslurm.wire.weight_transfer.collective import Channel, TransferError
from primeslurm.wire.weight_transfer.messages import OfferTransfer, SessionState
from tests.engine.conftest import STATUS_S, tiny_recipe
from tests.engine.test_wide_ep import check_weights, start_ranks
from tests.support.models import make_model
from tests.support.processes import EngineForks, Server

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def servers(engine_forks: EngineForks, model: Path) -> Iterator[list[Server]]:
    """Yield two engines that share their experts."""
    servers = start_ranks(engine_forks, model, 2, transport="nccl")
    for server in servers:
        server.wait("/primeslurm/status")
    yield servers
    for server in servers:
        server.stop()


class Exchange:
    """Acts as the orchestrator between engines and a trainer in this process."""

    def __init__(self, servers: list[Server], model: Path) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.sessions = TransferSessions(workers=1, timeout_s=300)
        self.wanting = 0
        self.engines = [
            EngineClient(lambda url=server.url: url, str(model), self.sessions, status_timeout_s=STATUS_S)
            for server in servers
        ]

    async def handle(self, request: Request) -> Answer:
        if isinstance(request, SessionState):
            return Answer("lost", self.sessions.lost_from(request.session))
        assert isinstance(request, OfferTransfer)
        return await self.sessions.answer(request, lambda: self.wanting, 2)

    async def apply(self, version: int, timeout_s: float = 600) -> list[Step | BaseException]:
        """Update all engines to the version that the trainer sends."""
        self.wanting = len(self.engines)

        async def one(engine: EngineClient) -> Step:
            try:
                return await engine.apply(PolicyVersion(version, ""), timeout_s)
            finally:
                self.wanting -= 1

        self.sessions.expect(version)
        return await asyncio.gather(*map(one, self.engines), return_exceptions=True)


@pytest.fixture
async def exchange(servers: list[Server], model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Exchange]:
    monkeypatch.setattr(
        "primeslurm.orchestrator.weight_updates.sessions.GATHER_S", 60
    )  # one session for both, even if one is slow
    exchange = Exchange(servers, model)
    serving = asyncio.create_task(OrchestratorLink(exchange.address, exchange.handle).serve())
    yield exchange
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def sender(model: Path, world: World, exchange: Exchange) -> Sender:
    """Return a trainer that holds the model."""
    policy = build(tiny_recipe(model), world)
    return Sender(policy, Encoding(torch.float32), TrainerLink(exchange.address), world, timeout_s=300)


async def test_engines_compute_with_what_the_trainer_sent(
    servers: list[Server], exchange: Exchange, world: World, tmp_path: Path
) -> None:
    for version in (1, 2):
        target = make_model(tmp_path / str(version), seed=20 + version)
        applying = asyncio.create_task(exchange.apply(version))
        assert await asyncio.to_thread(sender(target, world, exchange).send, version) == 1, "one session for both"
        assert await applying == [Step.UPDATE] * 2
        check_weights(servers, target, f"sent:{version}")


async def test_engines_recover_from_an_aborted_transfer(
    servers: list[Server], exchange: Exchange, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_model(tmp_path / "target", seed=30)
    send, failures = Channel.send, iter([TransferError("the cable is out")])

    def failing_once(channel: Channel, messages: Sequence[tuple[int, torch.Tensor]]) -> None:
        for error in failures:
            raise error
        send(channel, messages)

    monkeypatch.setattr(Channel, "send", failing_once)
    applying = asyncio.create_task(exchange.apply(3))
    assert await asyncio.to_thread(sender(target, world, exchange).send, 3) == 1
    assert await applying == [Step.UPDATE] * 2
    check_weights(servers, target, "after")


async def test_update_succeeds_without_a_dead_engine(
    servers: list[Server], exchange: Exchange, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer and all engines wait for it, until the orchestrator reports it as lost."""
    monkeypatch.setattr("primeslurm.wire.weight_transfer.collective.ARRIVE_S", 600)
    target = make_model(tmp_path / "target", seed=40)
    applying = asyncio.create_task(exchange.apply(5))
    await asyncio.sleep(0)  # let the expected messages be sent
    dying = asyncio.create_task(exchange.sessions.join(5, "engine-2"))
    exchange.wanting += 1
    sending = asyncio.create_task(asyncio.to_thread(sender(target, world, exchange).send, 5))
    place = await dying
    exchange.sessions.leave(place.session, "engine-2 was killed")
    exchange.wanting -= 1
    assert await sending == 1 and await applying == [Step.UPDATE] * 2
    check_weights(servers, target, "without it")


async def test_update_without_a_trainer_times_out(exchange: Exchange) -> None:
    exchange.sessions.expect(4)
    results = await exchange.apply(4, timeout_s=1)
    assert all(isinstance(result, EngineUpdateError) for result in results)

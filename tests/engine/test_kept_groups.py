"""A process group serves all weight updates over NCCL until an engine comes or goes, and the weights stay exact."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, EngineDownError, PolicyVersion, Step
from primeslurm.records.events.training import WeightsPublished
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weight_senders.collective_sender import CollectiveTransfer, Sender
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.link.messages import Answer, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.link.trainer_link import TrainerLink
from primeslurm.wire.weight_transfer.collective import Channel
from primeslurm.wire.weight_transfer.messages import NewPolicy
from tests.engine.conftest import STATUS_S, tiny_recipe
from tests.engine.test_collective_transfer import Exchange
from tests.engine.test_wide_ep import PROMPT, check_weights
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, logprobs
from tests.support.models import make_model
from tests.support.processes import EngineForks, Server

pytestmark = pytest.mark.engine


StartEngine = Callable[[Path], Server]


@pytest.fixture
def start(engine_forks: EngineForks) -> Iterator[StartEngine]:
    """Return a function that starts a separate engine of a model."""
    servers: list[Server] = []

    def start(model: Path) -> Server:
        command = engine_command(tiny_recipe(model, "nccl"), "cpu", "engine", sys.executable)
        servers.append(engine_forks.start(command))
        servers[-1].wait("/primeslurm/status")
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def train(policy: PolicyModel, model: Path, world: World) -> None:
    """Give the trainer's policy the weights of a model."""
    with torch.no_grad():
        new = build(tiny_recipe(model), world).model.parameters()
        for parameter, value in zip(policy.model.parameters(), new, strict=True):
            parameter.copy_(value)


async def test_group_is_kept_until_an_engine_is_killed(
    start: StartEngine, model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primeslurm.orchestrator.weight_updates.sessions.GATHER_S", 60)
    targets = [make_model(tmp_path / str(version), seed=60 + version) for version in range(5)]
    stays, dies = start(model), start(model)
    exchange = Exchange([stays, dies], model)

    async def handle(request: Request) -> Answer:
        return Answer("ok") if isinstance(request, NewPolicy) else await exchange.handle(request)

    serving = asyncio.create_task(OrchestratorLink(exchange.address, handle).serve())
    policy, link = build(tiny_recipe(model), world), TrainerLink(exchange.address)
    sender = Sender(policy, Encoding(torch.float32), link, world, timeout_s=300)
    transfer = CollectiveTransfer(sender, cast(Any, None), last=99, model=str(model), link=link, world=world)

    async def update(version: int, groups: int) -> list[Step | BaseException]:
        train(policy, targets[version], world)
        applying = asyncio.create_task(exchange.apply(version))
        events: list[WeightsPublished] = []
        await asyncio.to_thread(transfer.transfer, version, events.append)
        await asyncio.to_thread(transfer.finish)
        (published,) = events
        assert (published.version, published.groups) == (version, groups)
        return await applying

    for version in (1, 2):
        assert await update(version, groups=1) == [Step.UPDATE] * 2
        check_weights([stays, dies], targets[version], f"v{version}")

    send, kills = Channel.send, iter([dies.kill])

    def killing(channel: Channel, messages: Sequence[tuple[int, torch.Tensor]]) -> None:
        next(kills, lambda: None)()
        send(channel, messages)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "send", killing)
        first, second = await update(3, groups=2)
    assert first is Step.UPDATE and isinstance(second, EngineDownError)
    check_weights([stays], targets[3], "v3")

    joins = start(targets[4])
    fresh = EngineClient(lambda: joins.url, str(targets[4]), exchange.sessions, status_timeout_s=STATUS_S)
    assert await fresh.apply(PolicyVersion(0, str(targets[4])), 600) is Step.CONFIRM
    as_loaded = logprobs(generate(joins.url, PROMPT, 12, salt="loaded"))
    exchange.engines[1] = fresh
    assert await update(4, groups=3) == [Step.UPDATE] * 2
    for server in (stays, joins):  # bit equal to an engine that loaded the checkpoint
        assert logprobs(generate(server.url, PROMPT, 12, salt="v4")) == as_loaded
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)

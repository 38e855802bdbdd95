"""Engines with shared experts: each is one data-parallel rank with its own HTTP server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.support.ports import free_port
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.plan.commands.command import EngineRole
from primeslurm.plan.commands.engine import DataParallel
from tests.engine.conftest import ConnectEngine, StartRouter, tiny_recipe
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, generate_with_retries, metric, spans
from tests.support.kept_kv import kv_given_up, update_while_kv_is_kept
from tests.support.models import check_sampled_by, make_model, publish
from tests.support.port_messages import MESSAGES, Port, Response, send_all
from tests.support.processes import HOST, EngineForks, Server
from tests.support.strangers import attempted, needs_second_user

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [2, 5, 9, 14, 7, 3, 21]


def start_ranks(
    engine_forks: EngineForks, model: Path, size: int, role: EngineRole = "engine", transport: str = "filesystem"
) -> list[Server]:
    """Start the engines of one expert-parallel group. They wait for one another, so do not wait for any here."""
    recipe = tiny_recipe(model, transport, expert_parallel=True)
    port = free_port()
    servers = []
    for rank in range(size):
        command = engine_command(recipe, "cpu", role, sys.executable, DataParallel(size, rank, "rank-0"))
        ports = {"nixl": free_port()} | ({"dp_rpc": port} if rank == 0 else {})
        elsewhere = {"host:rank-0": HOST, "port:rank-0:dp_rpc": str(port)}
        elsewhere[f"port:nixl-{rank}"] = str(ports["nixl"] - rank)
        servers.append(engine_forks.start(command, ports, elsewhere))
    return servers


@pytest.fixture(scope="module")
def ranks(engine_forks: EngineForks, model: Path) -> Iterator[list[Server]]:
    servers = start_ranks(engine_forks, model, 2)
    for server in servers:
        server.wait("/primeslurm/status")
    yield servers
    for server in servers:
        server.stop()


def check_weights(servers: Sequence[Server], weights: Path, salt: str) -> None:
    """Check that engines sample by these weights."""
    for server in servers:
        check_sampled_by(weights, PROMPT, generate(server.url, PROMPT, 12, salt=salt))


async def test_every_rank_serves_during_policy_updates(
    ranks: list[Server], client: ConnectEngine, open_router: StartRouter, model: Path, tmp_path: Path
) -> None:
    controls = [client(rank) for rank in ranks]
    await asyncio.gather(*(control.apply(PolicyVersion(0, str(model)), 600) for control in controls))
    router = open_router(engines=ranks)
    router.wait("/health")
    for session in range(12):
        generate(router.url, PROMPT, 2, session=f"s{session}")
    assert all(metric(rank.url, "vllm:request_success_total") for rank in ranks)
    check_weights(ranks, model, "v0")

    target = make_model(tmp_path / "target", seed=9)
    policy = PolicyVersion(1, str(publish(target, tmp_path, 1)))
    running = [asyncio.create_task(asyncio.to_thread(generate, rank.url, PROMPT, 800)) for rank in ranks]
    while any(metric(rank.url, "vllm:generation_tokens_total") < 100 for rank in ranks):
        await asyncio.sleep(0.05)
    await asyncio.gather(*(control.apply(policy, 600) for control in controls))
    for answer in await asyncio.gather(*running):
        (old, start, boundary), (new, _, end) = spans(answer)
        assert (old, new, start, end) == (0, 1, 0, 800) and 0 < boundary < 800
    check_weights(ranks, target, "v1")


@pytest.mark.campaign
@needs_second_user
async def test_stranger_cannot_join_the_ranks(ranks: list[Server], client: ConnectEngine, tmp_path: Path) -> None:
    """torch's stores serve every client, at all addresses, and know who the ranks are."""
    ports = [port for number, server in enumerate(ranks) for port in ports_of(server, f"engine-{number}")]
    assert {port.host for port in ports} == {HOST}
    answers = [Response(*each) for each in attempted(lambda: send_all(ports)).value]
    stores = [
        answer.port for answer in answers if answer.message == "a store's client" and answer.description == "8 bytes"
    ]
    assert len(answers) == len(ports) * len(MESSAGES) and stores == []
    target = make_model(tmp_path / "target", seed=10)
    policy = PolicyVersion(2, str(publish(target, tmp_path, 2)))
    await asyncio.gather(*(client(rank).apply(policy, 600) for rank in ranks))
    check_weights(ranks, target, "v2")


def ports_of(server: Server, name: str) -> list[Port]:
    """Return the ports on which a server and its child processes listen."""
    leader = psutil.Process(server.pid)
    listening = [
        connection.laddr
        for process in (leader, *leader.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    return [Port(name, at.ip, at.port) for at in listening]


@pytest.mark.campaign
async def test_prefill_ranks_transfer_kv_to_any_decode_rank(
    engine_forks: EngineForks, client: ConnectEngine, open_router: StartRouter, model: Path, tmp_path: Path
) -> None:
    prefill, decode = start_ranks(engine_forks, model, 2, "prefill"), start_ranks(engine_forks, model, 2, "decode")
    try:
        for server in (*prefill, *decode):
            server.wait("/primeslurm/status", timeout_s=900)
        await asyncio.gather(
            *(client(server).apply(PolicyVersion(0, str(model)), 600) for server in (*prefill, *decode))
        )
        router = open_router(prefill=prefill, decode=decode, policy="round_robin")
        router.wait("/health")
        prompt = [2 + (7 * i) % 40 for i in range(200)]
        for session in range(4):
            # Four engines poll for one another on two cores, so a request takes up to half a minute.
            answer = generate_with_retries(router.url, prompt, 6, salt=f"s{session}", timeout_s=600)
            check_sampled_by(model, prompt, answer, tolerance=1e-3)
        assert all(metric(server.url, "vllm:nixl_bytes_transferred_count") > 0 for server in decode)
        policy = PolicyVersion(1, str(publish(make_model(tmp_path / "newer", seed=2), tmp_path, 1)))
        completion = await update_while_kv_is_kept(prefill, decode, router, client, policy, prompt[::-1])
        assert spans(completion) == [(0, 0, 0), (1, 0, 8)] and kv_given_up(prefill) == 0
    finally:
        for server in (*prefill, *decode):
            server.stop()

"""Emulated engines as processes: small, behind the real gate, used by the real clients."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.support.ports import free_port
from primeslurm.base.files import write_json
from primeslurm.inference.auth import Message
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.teacher import Teacher, TeacherError
from primeslurm.orchestrator.weight_updates.engine_client import (
    EngineClient,
    EngineDownError,
    EngineUpdateError,
    PolicyVersion,
    Step,
)
from primeslurm.plan.commands.command import ReplicaEngines
from primeslurm.plan.commands.routers import router_command
from primeslurm.plan.stand_ins import STAND_INS
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import VllmRouter
from primeslurm.testbed.emulated.engine import EmulatedEngine
from primeslurm.testbed.emulated.environment import EmulatedEnvironment
from primeslurm.wire.transport import addresses, secret
from primeslurm.wire.transport.addresses import AddressBook, Addresses
from primeslurm.wire.weight_transfer import filesystem
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, metric, spans, tokens
from tests.support.processes import HOST, Server, fill, start_router
from tests.support.recipes import recipe_data
from tests.support.waiting import wait_until_async

Start = Callable[..., Server]


def recipe(**changes: object) -> Recipe:
    return Recipe.model_validate(recipe_data(seq_len=512, **changes))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts an emulated engine with a real engine's command line."""
    servers: list[Server] = []

    def begin(role: str = "engine") -> Server:
        command = engine_command(recipe(), "cpu", role, sys.executable)  # type: ignore[arg-type]
        numbers = {name: free_port() for name in command.ports}
        values = {"host": HOST} | {f"port:{name}": str(number) for name, number in numbers.items()}
        argv = [fill(word, values) for word in (*command.argv[:2], STAND_INS[role], *command.argv[3:])]
        log = tmp_path / f"{role}-{len(servers)}.log"
        with log.open("w") as handle:
            process = subprocess.Popen(argv, stdout=handle, stderr=subprocess.STDOUT, start_new_session=True)
        servers.append(Server(process.pid, f"http://{HOST}:{numbers['http']}", log))
        servers[-1].wait("/primeslurm/status")
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()


def client(server: Server, status_timeout_s: float = 60.0) -> EngineClient:
    return EngineClient(lambda: server.url, "/models/tiny", status_timeout_s=status_timeout_s)


def publish(run_dir: Path, version: int) -> PolicyVersion:
    directory = filesystem.version_dir(run_dir, version)
    directory.mkdir(parents=True)
    save_file({"w": np.zeros(4, np.float32)}, directory / "model.safetensors")
    filesystem.complete(directory, version, "float32")
    return PolicyVersion(version, str(directory))


async def test_emulated_engine_serves_only_a_confirmed_policy(start: Start, tmp_path: Path) -> None:
    server = start()
    assert server.status_code("/health") == 503
    with pytest.raises(httpx.HTTPStatusError):
        generate(server.url, [5, 6, 7], 4)
    control = client(server)
    assert await control.apply(PolicyVersion(0, "/models/tiny"), 60) is Step.CONFIRM
    assert server.status_code("/health") == 200
    assert await control.apply(publish(tmp_path, 3), 60) is Step.UPDATE
    assert control.seconds["pause"] > control.seconds["load"] > 0 and control.seconds["wait"] >= 0
    answer = generate(server.url, [5, 6, 7], 4)
    assert len(tokens(answer)) == 4 and spans(answer) == [(3, 0, 4)]
    status = await control.status()
    assert (status.version, status.paused, status.updates) == (3, False, 1)
    await control.close()


async def test_missing_policy_is_refused(start: Start, tmp_path: Path) -> None:
    server = start()
    control = client(server)
    await control.apply(PolicyVersion(0, "/models/tiny"), 60)
    with pytest.raises(EngineUpdateError, match="of version 2"):
        await control.apply(PolicyVersion(2, str(tmp_path / "none")), 60)
    assert server.status_code("/health") == 503
    await control.close()


async def test_pending_requests_wait_for_an_update(start: Start, tmp_path: Path) -> None:
    server = start()
    control = client(server)
    await control.apply(PolicyVersion(0, "/models/tiny"), 60)
    update = publish(tmp_path, 1)
    running = asyncio.create_task(asyncio.to_thread(generate, server.url, [5, 6, 7], 500))
    await wait_until_async(lambda: metric(server.url, "vllm:generation_tokens_total") >= 10)
    await control.apply(update, 60)
    versions = [version for version, _, _ in spans(await running)]
    assert versions == [0, 1]
    await control.close()


async def test_emulated_engine_answers_as_a_teacher(start: Start) -> None:
    server = start()
    await client(server).apply(PolicyVersion(0, "/models/tiny"), 60)
    teacher = Teacher(lambda: [f"{server.url}/v1"], httpx.AsyncClient(headers=secret.header()))
    logprobs = await teacher.logprobs(list(range(5, 300)))
    assert logprobs.shape == (295,) and logprobs[0] == 0 and (logprobs[1:] < 0).all()
    assert metric(server.url, "vllm:generation_tokens_total") == 1, (
        "a prefill, and the one token that has to be asked for"
    )
    with pytest.raises(TeacherError, match="does not fit in 512"):
        await teacher.logprobs([5] * 512)
    await teacher.close()


async def test_hanging_engine_is_down_and_ends_on_a_signal(start: Start) -> None:
    server = start()
    await client(server).status()
    control = client(server, status_timeout_s=2.0)
    httpx.post(f"{server.url}/emulated/hang", headers=secret.header(), timeout=60).raise_for_status()
    with pytest.raises(EngineDownError):
        await control.status()
    assert server.alive()
    server._signal(signal.SIGTERM)
    assert server.wait_gone(600)
    await control.close()


async def test_disconnect_aborts_the_request(start: Start) -> None:
    server = start()
    await client(server).apply(PolicyVersion(0, "/models/tiny"), 60)
    with pytest.raises(httpx.ReadTimeout):
        generate(server.url, [5, 6, 7], 400, timeout_s=0.5)
    await wait_until_async(lambda: metric(server.url, "vllm:num_requests_running") == 0)


@pytest.mark.parametrize("turns", range(4))
async def test_disconnect_at_completion_is_harmless(turns: int) -> None:
    """A disconnect and a completion arrive in one turn of the event loop, in either order."""
    engine = EmulatedEngine("model", 64, tick_s=0.05)
    running = asyncio.create_task(engine.run())
    body = json.dumps({"token_ids": [5], "sampling_params": {"max_tokens": 1}}).encode()

    async def receive() -> Message:
        return {"body": body}

    async def send(message: Message) -> None:
        pass

    scope = {"method": "POST", "path": "/inference/v1/generate", "query_string": b""}
    request = asyncio.create_task(engine(scope, receive, send))  # type: ignore[arg-type]
    await asyncio.sleep(0.02)
    time.sleep(0.05)
    for _ in range(turns):
        await asyncio.sleep(0)
    request.cancel()
    await asyncio.sleep(0.1)
    assert not running.done()
    running.cancel()


def test_emulated_engine_uses_little_memory(start: Start) -> None:
    """Hundreds of them must fit on one small machine."""
    server = start()
    report = Path(f"/proc/{server.pid}/smaps_rollup").read_text()
    private_kib = sum(int(line.split()[1]) for line in report.splitlines() if line.startswith("Private_"))
    assert private_kib < 20 * 1024


async def test_a_rollout_goes_through_the_real_router_to_prefill_and_decode(start: Start, tmp_path: Path) -> None:
    prefill, decode = start("prefill"), start("decode")
    for server in (prefill, decode):
        await client(server).apply(PolicyVersion(0, "/models/tiny"), 60)
    made = recipe(orchestrator={"echo": 0.1})
    command = router_command(made, VllmRouter(), ReplicaEngines((), ("p",), ("d",)), "router-0")
    engines = {name: s.url.removeprefix("http://") for name, s in (("p", prefill), ("d", decode))}
    router = start_router(command, engines, tmp_path / "router.log")
    try:
        router.wait("/liveness")
        port = int(router.url.rpartition(":")[2])
        published = Addresses(hosts={"router-0": HOST}, ports={"router-0": {"http": port}})
        write_json(tmp_path / addresses.FILE, msgspec.to_builtins(published))
        environment = EmulatedEnvironment(made, AddressBook(tmp_path))
        jobs = [Job(f"job-{i}", "g", "reverse-text", 0, 0, "router-0", "run.1:0") for i in range(3)]
        done = await asyncio.gather(*map(environment.rollout, jobs))
        await environment.close()
    finally:
        router.kill()
    for (rollout,) in done:
        assert rollout.mask.any() and not rollout.mask[0]
        assert set(rollout.versions[rollout.mask]) == {0} and (rollout.logprobs[rollout.mask] < 0).all()
        answered = ~rollout.mask & (np.arange(len(rollout.mask)) > rollout.mask.argmax())
        assert rollout.observed is not None and (rollout.observed == answered).all()
    assert len({tuple(rollout.token_ids[: rollout.mask.argmax()]) for (rollout,) in done}) == 1
    turns = sum(rollout.info.turns for (rollout,) in done)
    assert metric(prefill.url, "vllm:request_success_total") == turns
    assert metric(decode.url, "vllm:external_prefix_cache_hits_total") > 0

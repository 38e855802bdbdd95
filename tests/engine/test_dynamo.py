"""Real engines as Dynamo workers behind Dynamo's real frontend.

`pip install ai-dynamo==1.6.1` replaces packages of vLLM. Install it, ai-dynamo-runtime==1.6.1, redis and zstandard with
`--no-deps`, and a torchvision that fits torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from benchmarks.support.servers import start_process
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion, Step
from primeslurm.orchestrator.worker.generate_endpoint import Completion, GenerateEndpoint
from primeslurm.plan.commands import dynamo
from primeslurm.plan.commands.command import EngineRole
from primeslurm.recipe.sections.routers import DynamoRouter
from tests.engine.conftest import ConnectEngine, tiny_engine
from tests.support.generate import generate, metric
from tests.support.models import make_constant_model, publish, reference_logprobs, token_id
from tests.support.processes import Server
from tests.support.waiting import wait_until_async

pytest.importorskip("dynamo.llm", reason="needs ai-dynamo, see above")
pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [3 + i % 40 for i in range(70)]
LENGTH = 1000
BLOCK = 128  # tokens of a KV block on CPUs

StartReplica = Callable[..., tuple[Server, list[Server]]]


@pytest.fixture
def start_replica(model: Path, tmp_path: Path) -> Iterator[StartReplica]:
    """Return a function that starts a frontend and workers of these roles, and waits for the workers' gates."""
    servers: list[Server] = []

    def start(roles: Sequence[EngineRole]) -> tuple[Server, list[Server]]:
        router = DynamoRouter()
        servers.append(start_process(dynamo.frontend(router, 0), {}, tmp_path / "frontend.log"))
        for i, role in enumerate(roles):
            command = tiny_engine(model, role, router=router.model_dump())
            command.env.pop("UCX_NET_DEVICES", None)  # an agent leaves empty variables out
            servers.append(start_process(command, {}, tmp_path / f"worker-{i}.log"))
        for worker in servers[1:]:
            worker.wait("/primeslurm/status")
        return servers[0], servers[1:]

    yield start
    for server in servers:
        server.stop()


async def confirm_first_policy(workers: Sequence[Server], client: ConnectEngine, model: Path) -> None:
    for worker in workers:
        await client(worker).apply(PolicyVersion(0, str(model)), 600)


async def completed(router: Server, salt: str, prompt: list[int] = PROMPT, length: int = 8) -> Completion:
    """Generate as a rollout does, which retries until a worker serves the policy."""
    endpoint = GenerateEndpoint(lambda: router.url, max_len=4096, timeout_s=600)
    sampling = {"max_tokens": length, "temperature": 0.0, "ignore_eos": True}
    try:
        body = {"token_ids": prompt, "cache_salt": salt, "sampling_params": sampling}
        return await endpoint.generate(body, {"X-Session-ID": "s"})
    finally:
        await endpoint.close()


async def test_policy_changes_during_generation(
    start_replica: StartReplica, client: ConnectEngine, tmp_path: Path
) -> None:
    router, (worker,) = start_replica(["engine"])
    control = client(worker)
    made = {1: make_constant_model(tmp_path / "a", "a"), 2: make_constant_model(tmp_path / "b", "b")}
    policies = {version: PolicyVersion(version, str(publish(made[version], tmp_path, version))) for version in made}
    with pytest.raises(httpx.HTTPStatusError):
        generate(router.url, PROMPT, 2)  # no policy is confirmed, so the worker has not joined
    assert worker.status_code("/health") == 503

    await control.apply(policies[1], timeout_s=600)
    answer = await completed(router, "r:1")
    assert answer.token_ids == [token_id("a")] * 8 and answer.versions == [1] * 8
    assert all(logprob <= 0 for logprob in answer.logprobs)

    running = asyncio.create_task(completed(router, "r:1", length=LENGTH))
    begun = metric(worker.url, "vllm:generation_tokens_total")
    await wait_until_async(lambda: metric(worker.url, "vllm:generation_tokens_total") > begun + 50)
    assert await control.apply(policies[2], timeout_s=600) is Step.UPDATE
    answer = await running
    old = answer.versions.count(1)
    assert 0 < old < LENGTH and answer.versions == [1] * old + [2] * (LENGTH - old)
    assert answer.token_ids == [token_id("a")] * old + [token_id("b")] * (LENGTH - old)

    with pytest.raises(httpx.HTTPStatusError) as refused:
        generate(router.url, PROMPT, 2, salt="r:3")  # the worker has missed version 3
    assert refused.value.response.status_code >= 500 and worker.status_code("/health") == 503


async def test_requests_go_to_the_worker_that_has_cached_their_prefix(
    start_replica: StartReplica, client: ConnectEngine, model: Path
) -> None:
    router, workers = start_replica(["engine", "engine"])
    await confirm_first_policy(workers, client, model)
    prompts = [[first, *PROMPT * 4] for first in (2, 3, 4)]
    for prompt in prompts:
        await completed(router, "r:0", prompt)

    def hits() -> float:
        return sum(metric(worker.url, "vllm:prefix_cache_hits_total") for worker in workers)

    before = hits()
    for prompt in prompts[::-1]:  # in turn, each would go to the other worker
        await completed(router, "r:0", prompt)
    assert hits() - before == len(prompts) * 2 * BLOCK
    await completed(router, "other:0", prompts[0])
    assert hits() - before == len(prompts) * 2 * BLOCK  # another salt


async def test_prefill_and_decode_workers_answer_as_one(
    start_replica: StartReplica, client: ConnectEngine, model: Path
) -> None:
    router, workers = start_replica(["prefill", "decode"])
    await confirm_first_policy(workers, client, model)
    answer = await completed(router, "r:0")
    assert answer.versions == [0] * 8
    expected = reference_logprobs(model, PROMPT + answer.token_ids)[len(PROMPT) - 1 :]
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    assert metric(workers[1].url, "vllm:nixl_bytes_transferred_count") > 0

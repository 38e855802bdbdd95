"""The Mooncake store with its build for CUDA: blocks that a GPU engine evicted come back from its node's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.support.ports import free_port
from benchmarks.support.servers import HOST, Server, start_process
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.plan.commands.kv import store_client, store_master
from primeslurm.recipe import Recipe
from tests.gpu.test_weights import make_model, recipe, start_engine
from tests.support.generate import generate, logprobs, metric

pytest.importorskip("mooncake")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(1, 12, "module", 4),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; test_kv_offload covers CPUs"),
]
TOKEN_BYTES = 6 * 2 * 4 * 128 * 2
"""Keys and values of a token: 6 layers, 4 heads of 128 numbers in bfloat16."""
STORE = {"type": "mooncake", "protocol": "tcp", "cpu": {"bytes": 2**29}}
PROMPTS = [[3 + (i * k) % 1000 for i in range(897)] for k in range(1, 17, 2)]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Return a recipe whose engine has room for two of the eight prompts."""
    model = make_model(tmp_path_factory.mktemp("model"), 0)
    return recipe(model, "filesystem", kv_cache_bytes=2048 * TOKEN_BYTES, kv_offload=STORE)


@pytest.fixture(scope="module")
def store(asked: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the placeholders by which engines find a running store."""
    log = tmp_path_factory.mktemp("store") / "store.log"
    ports = {name: free_port() for name in ("rpc", "metadata", "http")}
    addresses = {f"addr:store-master:{name}": f"{HOST}:{port}" for name, port in ports.items()}
    servers: list[Server] = []
    try:
        servers.append(start_process(store_master(asked), {}, log, ports))
        servers[-1].wait("/health", timeout_s=60)
        servers.append(start_process(store_client(asked.inference.kv_offload, "cuda"), addresses, log))
        servers[-1].wait("/health", timeout_s=60)
        yield addresses
    finally:
        for server in reversed(servers):
            server.stop()


def test_evicted_blocks_come_back_from_the_store(asked: Recipe, store: dict[str, str], tmp_path: Path) -> None:
    engine = start_engine(asked, tmp_path / "engine.log", store)
    try:
        asyncio.run(open_gate(engine, asked.model.path))

        def answer(prompt: list[int], salt: str) -> float:
            """Return the log-probability of the token that follows a prompt."""
            return logprobs(generate(engine.url, prompt, 1, salt=salt))[0]

        hits = "vllm:external_prefix_cache_hits_total"
        cached = []
        for prompt in PROMPTS:
            answer(prompt, "a")
            cached.append(answer(prompt, "a"))  # from the GPU's own cache
        assert metric(engine.url, hits) == 0
        # Only the last token is computed, as with the GPU's own cache, so there is no difference in rounding.
        assert [answer(prompt, "a") for prompt in PROMPTS] == pytest.approx(cached, abs=1e-3)
        found = metric(engine.url, hits)
        assert found >= 6 * 800, "the store lost blocks that the GPU had evicted"
        for prompt in PROMPTS:
            answer(prompt, "b")
        assert metric(engine.url, hits) == found, "the KV of another policy was used"
        print(f"RESULT kv store on a GPU: {found:.0f} of {sum(map(len, PROMPTS))} tokens came from the store")
    finally:
        engine.stop()


async def open_gate(engine: Server, model: str) -> None:
    client = EngineClient(lambda: engine.url, model)
    try:
        await client.apply(PolicyVersion(0, model), 300)
    finally:
        await client.close()

"""Offloaded KV blocks come back: from memory, from disk, for other engines, and never for another policy."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.ports import free_port
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.plan.commands.command import Command, EngineRole
from primeslurm.plan.commands.kv import store_client, store_master
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.routed_experts import from_npy
from tests.engine.conftest import ConnectEngine, StartRouter, tiny_recipe
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, generate_with_retries, metric, tokens
from tests.support.processes import HOST, EngineForks, Server, start_process

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
HITS = "vllm:external_prefix_cache_hits_total"
CACHE = 768 * 2 * 2 * 32 * 4
"""Bytes of 768 tokens (keys and values of 2 layers, 1 head of 32 floats): two of the prompts below."""
DISK = 4 * CACHE
"""Bytes of the disk tier: eight of the prompts below."""
MOONCAKE = {"type": "mooncake", "cpu": {"bytes": 2**26}}
PROMPTS = [[2 + (i * k) % 40 for i in range(321)] for k in (1, 3, 7, 9)]


def small_engine(model: Path, role: EngineRole = "engine", replay: bool = False, **inference: Any) -> Command:
    """Return an engine whose cache cannot hold all prompts."""
    recipe = tiny_recipe(model, kv_cache_bytes=CACHE, vllm_extra={"max_model_len": 640}, **inference)
    trainer = recipe.trainer.model_copy(update={"router_replay": replay})
    return engine_command(recipe.model_copy(update={"trainer": trainer}), "cpu", role, sys.executable)


def answers(url: str, salt: str) -> list[list[int]]:
    """Return the completion of every prompt."""
    return [tokens(generate_with_retries(url, prompt, 4, salt=salt, **without_rows(prompt))) for prompt in PROMPTS]


def without_rows(prompt: list[int]) -> dict[str, int]:
    """Return the sampling parameter of a turn whose prompt's routed experts are known."""
    return {"routed_experts_prompt_start": len(prompt)}


def reused(url: str) -> float:
    """Return the prompt tokens that an engine had in its cache or got from the store."""
    return metric(url, "vllm:prefix_cache_hits_total") + metric(url, HITS)


async def open_at_once(engine: Server, client: Any, model: Path) -> Server:
    engine.wait("/primeslurm/status")
    await client(engine).apply(PolicyVersion(0, str(model)), 600)
    return engine


@pytest.mark.parametrize("disk", [pytest.param(False, marks=pytest.mark.campaign), True])
async def test_offload_tiers_restore_evicted_blocks(
    disk: bool, engine_forks: EngineForks, client: ConnectEngine, model: Path, tmp_path: Path
) -> None:
    tiers: dict[str, Any] = {"type": "native", "cpu": {"bytes": 2**21}}
    if disk:
        tiers |= {"cpu": {"bytes": CACHE}, "disk": {"path": str(tmp_path), "bytes": DISK}}
    engine = engine_forks.start(small_engine(model, replay=disk, kv_offload=tiers))
    try:
        await open_at_once(engine, client, model)
        first = answers(engine.url, "a")
        assert metric(engine.url, HITS) == 0
        assert answers(engine.url, "a") == first
        hits = metric(engine.url, HITS)
        assert hits >= 4 * 256
        answers(engine.url, "b")
        assert metric(engine.url, HITS) == hits  # the KV blocks of another policy are never used
        assert any(tmp_path.rglob("*.bin")) == disk
        for salt in "cde" if disk else "":  # more blocks than the disk tier holds
            first = answers(engine.url, salt)
            assert answers(engine.url, salt) == first
            # The hits that a bounded tier still gives never change an answer.
            assert sum(path.stat().st_size for path in tmp_path.rglob("*.bin")) <= DISK
        if disk:  # the engine computes blocks again if the request needs their routed experts
            hits = metric(engine.url, HITS)
            answer = generate(engine.url, PROMPTS[0], 4, salt="e")
            experts = from_npy(answer["choices"][0]["routed_experts"].encode(), 321 + 4 - 1)
            assert experts.max() < 8 and metric(engine.url, HITS) == hits
    finally:
        engine.stop()


@dataclass
class Store:
    """A running Mooncake store: one master, one client."""

    recipe: Recipe
    master: Server
    client: Server
    ports: dict[str, int]
    log: Path

    @property
    def elsewhere(self) -> dict[str, str]:
        """Placeholders by which engines and clients find the master."""
        return addresses(self.ports)

    def restart_master(self) -> None:
        """Restart the master as an agent would."""
        self.master.kill()
        self.master = start_process(store_master(self.recipe), {}, self.log, self.ports)
        self.master.wait("/health")
        self.client.wait("/health")  # 503 until it has found the new master


def addresses(ports: dict[str, int]) -> dict[str, str]:
    return {f"addr:store-master:{name}": f"{HOST}:{port}" for name, port in ports.items()}


@pytest.fixture
def store(model: Path, tmp_path: Path) -> Iterator[Store]:
    recipe = tiny_recipe(model, kv_offload=MOONCAKE)
    ports = {name: free_port() for name in ("rpc", "metadata", "http")}
    log = tmp_path / "store.log"
    master = start_process(store_master(recipe), {}, log, ports)
    master.wait("/health")
    client = start_process(store_client(recipe.inference.kv_offload, "cpu"), addresses(ports), log)
    client.wait("/health")
    running = Store(recipe, master, client, ports, log)
    yield running
    for server in (running.client, running.master):
        server.stop()


VALUES = """
import sys, time
from mooncake.store import MooncakeDistributedStore
role, host, metadata, master = sys.argv[1:]
store = MooncakeDistributedStore()
assert store.setup(host, f"http://{metadata}/metadata", 0, 2**26, "tcp", "", master) == 0
values = {f"k{i}": (b"%08d" % i) * 8192 for i in range(1200)}
if role == "write":
    for key, value in values.items():
        while store.put(key, value):
            time.sleep(0.2)
else:
    replicas = [store.get_replica_desc(key) for key in values]
    print(sum(all(replica.is_local_disk_replica() for replica in of_key) for of_key in replicas))
    print(sum(store.get(key) == value for key, value in values.items()))
store.close()
"""


@pytest.mark.campaign
def test_values_evicted_from_memory_are_read_from_disk(model: Path, tmp_path: Path) -> None:
    """75 MiB of values in two clients with 32 MiB of memory each."""
    tiers = {"cpu": {"bytes": 2**25}, "disk": {"path": str(tmp_path), "bytes": 2**28}}
    recipe = tiny_recipe(model, kv_offload=MOONCAKE | tiers)
    ports = {name: free_port() for name in ("rpc", "metadata", "http")}
    servers = [start_process(store_master(recipe), {}, tmp_path / "master.log", ports)]
    try:
        servers[0].wait("/health")
        for name in "ab":
            client = store_client(recipe.inference.kv_offload, "cpu")
            disk = tmp_path / name
            disk.mkdir()
            client = client._replace(env=client.env | {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(disk)}, scratch=())
            servers.append(start_process(client, addresses(ports), tmp_path / f"{name}.log"))
            servers[-1].wait("/health")

        def run(role: str) -> list[int]:
            at = [f"{HOST}:{ports[name]}" for name in ("metadata", "rpc")]
            command = [sys.executable, "-c", VALUES, role, HOST, *at]
            output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout
            return [int(line) for line in output.split() if line.isdigit()]

        run("write")
        on_disk_only, readable = run("read")
        assert on_disk_only > 100
        assert readable == 1200
        assert all(any((tmp_path / name).iterdir()) for name in "ab")
    finally:
        for server in reversed(servers):
            server.stop()


@pytest.mark.campaign
async def test_engines_share_a_store_and_survive_its_master(
    store: Store, engine_forks: EngineForks, client: ConnectEngine, open_router: StartRouter, model: Path
) -> None:
    def start(role: EngineRole) -> Server:
        command = small_engine(model, role, replay=True, kv_offload=MOONCAKE)
        return engine_forks.start(command, elsewhere=store.elsewhere)

    plain, prefill, decode = engines = [start("engine"), start("prefill"), start("decode")]
    try:
        for engine in engines:
            await open_at_once(engine, client, model)
        router = open_router(prefill=[prefill], decode=[decode])
        router.wait("/health")
        first = answers(plain.url, "a")
        assert metric(plain.url, HITS) == 0
        assert answers(router.url, "a") == first
        assert metric(prefill.url, HITS) >= 4 * 256  # the plain engine's blocks
        assert metric(decode.url, "vllm:nixl_bytes_transferred_count") >= 4

        turn = generate(router.url, PROMPTS[0], 200, salt="a")
        longer = PROMPTS[0] + tokens(turn)
        before = reused(prefill.url)
        next_turn = tokens(generate(router.url, longer, 4, salt="a", **without_rows(longer)))
        assert reused(prefill.url) - before >= 512  # blocks beyond the prompt are the decode engine's
        assert next_turn == tokens(generate(plain.url, longer, 4, salt="fresh"))

        # Prefill computes blocks of another engine again if the request needs their routed experts.
        other, hits = PROMPTS[1][::-1], metric(prefill.url, HITS)
        routed = [generate(url, other, 4, salt="r")["choices"][0] for url in (plain.url, router.url)]
        assert routed[0]["routed_experts"] and routed[0]["routed_experts"] == routed[1]["routed_experts"]
        assert metric(prefill.url, HITS) == hits

        store.restart_master()
        hits = metric(prefill.url, HITS)
        for attempt in range(120):  # without a store engines compute, until their clients have found it again
            answers(plain.url, f"c{attempt}")
            answers(router.url, f"c{attempt}")
            if metric(prefill.url, HITS) > hits:
                break
            await asyncio.sleep(0.5)
        assert metric(prefill.url, HITS) > hits
    finally:
        for engine in engines:
            engine.stop()

"""Real engines that publish KV events, and the real vllm-router that reads them."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest
import zmq

from benchmarks.support.ports import free_port
from benchmarks.support.servers import start_process
from primeslurm.inference import kv_events as inference_kv_events
from primeslurm.orchestrator.rollouts.cache_salt import cache_salt
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import SESSION_HEADER, GenerateEndpoint
from primeslurm.plan.commands import kv_events
from primeslurm.plan.commands.command import EngineRole, ReplicaEngines
from primeslurm.plan.commands.routers import router_command
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import VllmRouter
from primeslurm.wire.names import SERVED_MODEL, STATUS_PATH
from tests.engine.conftest import ConnectEngine
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, metric
from tests.support.models import make_model, publish
from tests.support.processes import HOST, EngineForks, Server
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT_TOKENS = 200  # three blocks of engines
FULL_BLOCKS = 192.0
RL = {"max_steps": 1, "environments": [{"id": "reverse-text"}]}
_starts = itertools.product(range(2, 40), repeat=2)


class Router(NamedTuple):
    server: Server
    metrics: str

    def lookups(self, result: str) -> float:
        """Count the requests for which the router looked for cached blocks with this result."""
        lines = httpx.get(f"{self.metrics}/metrics", timeout=60, verify=False).text.splitlines()
        start = f'vllm_router_kv_placement_lookups_total{{result="{result}"}}'
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


class Replica:
    """Engines with `policy: kv_aware`, and their router. `sections`: of the recipe, for the task."""

    def __init__(
        self,
        engine_forks: EngineForks,
        model: Path,
        directory: Path,
        roles: Sequence[EngineRole],
        sections: Mapping[str, Any],
    ) -> None:
        values = {
            "name": "test",
            "seq_len": 1024,
            **sections,
            "model": {"path": str(model), "dtype": "float32"},
            "inference": {"kv_cache_bytes": 2**25, "router": {"type": "vllm-router", "policy": "kv_aware"}},
        }
        self._recipe, self._directory = Recipe.model_validate(values), directory
        self._routers, self.servers, self._values = list[Router](), list[Server](), dict[str, str]()
        names: dict[EngineRole, list[str]] = {"engine": [], "prefill": [], "decode": []}
        for number, role in enumerate(roles):
            command = engine_command(self._recipe, "cpu", role, sys.executable)
            ports = {name: free_port() for name in command.ports}
            self.servers.append(engine_forks.start(command, ports, {"host:router-0": HOST}))
            names[role].append(f"e{number}")
            self._values |= {f"addr:e{number}:{name}": f"{HOST}:{port}" for name, port in ports.items()}
        self._workers = ReplicaEngines(names["engine"], names["prefill"], names["decode"])
        for server in self.servers:
            server.wait("/health" if self._recipe.task == "serve" else STATUS_PATH)

    def start_router(self) -> Router:
        for router in self._routers:
            router.server.stop()
        settings = self._recipe.inference.router
        assert isinstance(settings, VllmRouter)
        command = router_command(self._recipe, settings, self._workers, "router-0")
        log, port = self._directory / f"router-{len(self._routers)}.log", free_port()
        server = start_process(command, self._values, log, {"metrics": port})
        self._routers.append(Router(server, f"http://{HOST}:{port}"))
        server.wait("/health")
        return self._routers[-1]

    def stop(self) -> None:
        for server in (*(router.server for router in self._routers), *self.servers):
            server.stop()


@pytest.fixture
def start_replica(engine_forks: EngineForks, model: Path, tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    replicas: list[Replica] = []

    def start(*roles: EngineRole, **sections: Any) -> Replica:
        replicas.append(Replica(engine_forks, model, tmp_path, roles, sections or {"task": "serve"}))
        return replicas[-1]

    yield start
    for replica in replicas:
        replica.stop()


def new_prompt() -> list[int]:
    """Return a prompt whose first block no earlier prompt has."""
    first, second = next(_starts)
    return [first, second, *(2 + (7 * i) % 40 for i in range(PROMPT_TOKENS))]


def cached_on(engine: Server) -> list[int]:
    """Return a prompt that an engine has just cached. The request does not pass the router."""
    prompt = new_prompt()
    generate(engine.url, prompt, 1)
    return prompt


def served_by(router: Router, engines: Sequence[Server], prompt: list[int]) -> Server:
    """Return the engine to which the router sends a prompt."""
    before = [metric(engine.url, "vllm:request_success_total") for engine in engines]
    generate(router.server.url, prompt, 1, model=SERVED_MODEL)
    after = [metric(engine.url, "vllm:request_success_total") for engine in engines]
    (chosen,) = [engine for engine, old, new in zip(engines, before, after, strict=True) if new > old]
    return chosen


def wait_for_events(router: Router, engines: Sequence[Server]) -> None:
    """Wait until the router finds a new prompt of each engine, and check that it sends the prompt there."""
    for engine in (*engines, *engines):

        def found(engine: Server = engine) -> bool:
            prompt, hits = cached_on(engine), router.lookups("hit")
            chosen = served_by(router, engines, prompt)
            if router.lookups("hit") == hits:
                return False  # the event has not arrived yet
            assert chosen is engine
            return True

        wait_until(found)


@pytest.mark.campaign
def test_a_request_goes_to_the_engine_that_has_cached_its_prefix(start_replica: Callable[..., Replica]) -> None:
    replica = start_replica("engine", "engine")
    engines = replica.servers
    for engine in engines:
        old = cached_on(engine)  # before there is a router, or this router
        router = replica.start_router()
        wait_for_events(router, engines)
        hits = router.lookups("hit")
        assert served_by(router, engines, old) is engine and router.lookups("hit") == hits + 1


@pytest.mark.campaign
def test_a_prompt_goes_to_the_prefill_engine_that_has_cached_its_prefix(start_replica: Callable[..., Replica]) -> None:
    replica = start_replica("prefill", "prefill", "decode")
    wait_for_events(replica.start_router(), replica.servers[:2])


class Rollouts:
    """Requests of rollouts, as workers send them."""

    def __init__(self, replica: Replica) -> None:
        self._publishers = replica.servers[:2]

    async def request(
        self, url: str, prompt: list[int], version: int, session: str | None = None
    ) -> tuple[Server, float]:
        """Send a prompt. Return the engine that prefilled it, and how many of its tokens were cached there."""
        endpoint = GenerateEndpoint(lambda: url, 1024, 300, kv_aware=True)
        body = {"token_ids": prompt, "cache_salt": cache_salt("run.1", version), "sampling_params": {"max_tokens": 1}}
        before = [self._counts(engine) for engine in self._publishers]
        await endpoint.generate(body, {SESSION_HEADER: session} if session else {})
        await endpoint.close()
        for engine, (requests, cached) in zip(self._publishers, before, strict=True):
            if (now := self._counts(engine))[0] > requests:
                return engine, now[1] - cached
        raise AssertionError("no engine has prefilled the prompt")

    def _counts(self, engine: Server) -> tuple[float, float]:
        return metric(engine.url, "vllm:request_success_total"), metric(engine.url, "vllm:prefix_cache_hits_total")

    async def wait_for_credit(self, router: Router, version: int) -> dict[str, list[int]]:
        """Wait until the router sends new prompts to the engine that has cached them, and return them by engine."""
        prompts = {}
        for engine in self._publishers:
            while engine.url not in prompts:
                prompt = new_prompt()
                await self.request(engine.url, prompt, version)
                hits = router.lookups("hit")
                chosen, cached = await self.request(router.server.url, prompt, version)
                if router.lookups("hit") > hits:  # otherwise the event has not arrived yet
                    assert chosen is engine and cached == FULL_BLOCKS
                    prompts[engine.url] = prompt
        return prompts


@pytest.mark.parametrize(
    "roles", [("engine", "engine"), pytest.param(("prefill", "prefill", "decode"), marks=pytest.mark.campaign)]
)
async def test_rollouts_go_to_the_engine_that_has_their_prefix_of_their_policy(
    start_replica: Callable[..., Replica],
    client: ConnectEngine,
    model: Path,
    tmp_path: Path,
    roles: tuple[EngineRole, ...],
) -> None:
    replica = start_replica(*roles, **RL)
    rollouts, second = Rollouts(replica), replica.servers[1]

    async def update(version: int, path: Path) -> None:
        policy = PolicyVersion(version, str(path))
        await asyncio.gather(*(client(server).apply(policy, 600) for server in replica.servers))

    await update(0, model)
    router = replica.start_router()
    prompt = (await rollouts.wait_for_credit(router, 0))[second.url]

    await update(1, publish(make_model(tmp_path / "m", seed=1), tmp_path, 1))
    hits = router.lookups("hit")
    _, cached = await rollouts.request(router.server.url, prompt, 1)
    assert (router.lookups("hit"), cached) == (hits, 0)  # neither credit for KV of the old policy, nor its reuse
    next_turn = prompt + [5] * 70
    # Rollouts of groups that opened before the update keep their salt.
    assert await rollouts.request(router.server.url, next_turn, 0) == (second, FULL_BLOCKS)

    router = replica.start_router()
    prompts = await rollouts.wait_for_credit(router, 1)
    chosen, cached = await rollouts.request(router.server.url, next_turn, 0)
    assert chosen is second and cached > FULL_BLOCKS
    if "prefill" not in roles:  # a rollout stays on its engine
        for prompt in prompts.values():
            assert (await rollouts.request(router.server.url, prompt, 1, "s"))[0] is replica.servers[0]


def test_only_the_address_of_the_router_can_read_events(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import AllBlocksCleared, EventPublisherFactory, KVEventBatch
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setattr(EventPublisherFactory, "_registry", dict(EventPublisherFactory._registry))
    monkeypatch.setattr(AsyncLLM, "get_kv_event_sources", AsyncLLM.get_kv_event_sources)
    inference_kv_events.use(
        "127.77.0.1", hides_salt=False
    )  # a node of an emulated cluster, whose connections come from HOST
    rank_3 = SimpleNamespace(engine_core=SimpleNamespace(get_kv_event_sources=lambda: {3: "its config"}))
    assert AsyncLLM.get_kv_event_sources(rank_3) == {0: "its config"}
    ports = {kv_events.EVENTS: free_port(), kv_events.REPLAY: free_port()}
    endpoints = [f"tcp://{HOST}:{port}" for port in ports.values()]
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoints[0], replay_endpoint=endpoints[1])
    publisher = EventPublisherFactory.create(config, 3)
    with zmq.Context() as context, context.socket(zmq.SUB) as reader, context.socket(zmq.SUB) as stranger:
        for socket, source in ((reader, HOST), (stranger, "127.0.0.2")):
            socket.linger = 0
            socket.subscribe(b"")
            socket.connect(f"tcp://{source}:0;{HOST}:{ports[kv_events.EVENTS]}")

        def publish() -> bool:
            publisher.publish(KVEventBatch(ts=1.0, events=[AllBlocksCleared()]))
            return bool(reader.poll(200))

        wait_until(publish)
        assert reader.recv_multipart()[2].endswith(b"\x00")  # of data-parallel rank 0
        assert not stranger.poll(1000)
    publisher.shutdown()

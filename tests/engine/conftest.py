"""Fixtures that start real engines and routers, at free ports. Each process group is ended at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from primeslurm.orchestrator.weight_updates.engine_client import EngineClient
from primeslurm.plan.commands.command import Command, EngineRole, ReplicaEngines
from primeslurm.plan.commands.routers import router_command
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import VllmRouter
from tests.support.engine_commands import engine_command
from tests.support.models import make_model
from tests.support.processes import EngineForks, Server, start_router

StartEngine = Callable[..., Server]
StartRouter = Callable[..., Server]
ConnectEngine = Callable[[Server], EngineClient]
STATUS_S = 60.0
"""Longest wait for a status [s]. An engine on few shared cores may need more than a run allows."""


def tiny_recipe(model: Path, transport: str = "filesystem", **inference: Any) -> Recipe:
    """Return a recipe for a tiny model, for command lines."""
    return Recipe.model_validate(
        {
            "name": "test",
            "max_steps": 1,
            "seq_len": 4096,
            "model": {"path": str(model), "dtype": "float32"},
            "environments": [{"id": "reverse-text"}],
            "inference": {"kv_cache_bytes": 32 * 2**20, **inference},
            "weights": {"transport": transport},
        }
    )


def tiny_engine(model: Path, role: EngineRole = "engine", **inference: Any) -> Command:
    """Return the command of a CPU engine."""
    return engine_command(tiny_recipe(model, **inference), "cpu", role, sys.executable)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return policy version 0: a random Qwen3-MoE."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine_forks(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[EngineForks]:
    """Yield a process that forks an engine in two seconds."""
    plugins = [point.name for point in entry_points(group="vllm.general_plugins")]
    assert "primeslurm" in plugins, "vLLM would not find our plugin: install the package (pip install -e .)"
    env = {key: value for key, value in tiny_engine(model).env.items() if "${" not in value}
    engine_forks = EngineForks(tmp_path_factory.mktemp("engines"), env)
    yield engine_forks
    engine_forks.close()


@pytest.fixture(scope="module")
def start_engine(engine_forks: EngineForks, model: Path) -> Iterator[StartEngine]:
    """Return a function that starts an engine and waits for its gate, which is still closed."""
    servers: list[Server] = []

    def start(role: EngineRole = "engine", source: Path = model, **ports: int) -> Server:
        server = engine_forks.start(tiny_engine(source, role), ports)
        servers.append(server)
        server.wait("/primeslurm/status")
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def engine(engine_forks: EngineForks, model: Path) -> Iterator[Server]:
    """Yield the engine of tests that need no other options. Each updates it to version numbers of its own."""
    server = engine_forks.start(tiny_engine(model))
    server.wait("/primeslurm/status")
    yield server
    server.stop()


@pytest.fixture
def open_router(model: Path, tmp_path: Path) -> Iterator[StartRouter]:
    """Return a function that starts a router, which listens once its engines are open."""
    routers: list[Server] = []

    def start(
        engines: Sequence[Server] = (),
        prefill: Sequence[Server] = (),
        decode: Sequence[Server] = (),
        policy: str = "consistent_hash",
    ) -> Server:
        named = {server.url.rpartition(":")[2]: server for server in (*engines, *prefill, *decode)}
        groups = [[s.url.rpartition(":")[2] for s in group] for group in (engines, prefill, decode)]
        command = router_command(tiny_recipe(model), VllmRouter(policy=policy), ReplicaEngines(*groups), "router-0")
        addresses = {name: server.url.removeprefix("http://") for name, server in named.items()}
        router = start_router(command, addresses, tmp_path / f"router-{len(routers)}.log")
        routers.append(router)
        return router

    yield start
    for router in routers:
        router.stop()


@pytest.fixture
def client(model: Path) -> ConnectEngine:
    """Return a function that makes the orchestrator's client of an engine."""
    return lambda server: EngineClient(lambda: server.url, str(model), status_timeout_s=STATUS_S)

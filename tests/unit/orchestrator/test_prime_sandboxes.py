"""Rollouts at Prime Intellect, with the real client and runtime and a fake service."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import PrimeConfig, provision_runtime

from primeslurm.recipe import Recipe
from primeslurm.testbed.fakes.scripted_engine import ScriptedEngine, tool_call
from tests.support import prime_service
from tests.support.prime_service import PrimeService
from tests.support.verifiers_restored import restored
from tests.unit.orchestrator import test_harbor

KEY = "of-the-account"
model = test_harbor.model


@pytest.fixture(autouse=True)
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrimeService]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with restored(monkeypatch), prime_service.serving(PrimeService(tmp_path / "box", KEY)) as service:
        monkeypatch.setenv("PRIME_API_BASE_URL", service.url)
        monkeypatch.setenv("PRIME_API_KEY", KEY)
        yield service


def recipe(model: str, **runtime: Any) -> Recipe:
    """A recipe whose sandbox reaches the model through a port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tunnel = {"type": "custom", "url": f"http://127.0.0.1:{port}", "port": port}
    args = {"path": str(test_harbor.EXAMPLES), "env": {"interception": {"type": "server", "tunnel": tunnel}}}
    return test_harbor.recipe(model, "shell", args=args, runtime={"type": "prime", "image": "python:3.12", **runtime})


async def test_harbor_task_is_set_up_solved_and_graded_at_the_provider(
    provider: PrimeService, model: str, tmp_path: Path
) -> None:
    limits = {"cpus": 2, "memory_gb": 4, "disk_gb": 3, "network": "none"}
    own = {"region": "eu", "labels": ["mine"], "idle_timeout": 600, "gpu": "A100:2"}
    made = recipe(model, limits=limits, **own)
    with ScriptedEngine(Path(model), [tool_call("sh", command=test_harbor.SOLUTION), "Done."]) as engine:
        engine.version = 3
        (rollout,) = await test_harbor.played(made, engine, tmp_path)
    assert rollout.info.reward == 1.0 and rollout.info.turns == 2
    (request,) = provider.created
    assert (request["docker_image"], request["region"], request["idle_timeout_minutes"]) == ("python:3.12", "eu", 10)
    assert (request["cpu_cores"], request["memory_gb"], request["disk_size_gb"]) == (2, 4, 3)
    assert (request["gpu_type"], request["gpu_count"]) == ("A100", 2)
    assert "mine" in request["labels"] and len(request["labels"]) == 2, "verifiers adds the run's id"
    assert [each["allowlist"] for each in provider.policies] == [["127.0.0.1"], None], "the tests have an open network"
    assert provider.deleted == [prime_service.ID]
    assert KEY not in "".join((*provider.commands, json.dumps(provider.created)))


async def test_wrong_key_is_an_error_of_the_rollout(provider: PrimeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_API_KEY", "another")
    with pytest.raises(SandboxError, match="provisioning failed"):
        async with provision_runtime(PrimeConfig()):
            pass
    assert provider.created == []

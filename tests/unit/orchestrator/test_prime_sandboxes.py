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

from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.worker.main import Worker
from primeslurm.orchestrator.worker.token_client import TokenClient, serving
from primeslurm.recipe import Recipe
from primeslurm.testbed.fakes.scripted_engine import ScriptedEngine, tool_call
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.transport.addresses import AddressBook
from scripts.models import tiny_model
from tests.support import prime_service
from tests.support.prime_service import PrimeService
from tests.support.verifiers_restored import restored

EXAMPLES = Path(__file__).parents[3] / "examples" / "harbor"
SOLUTION = (EXAMPLES / "wrong-total/solution/solve.sh").read_text().splitlines()[-1]
KEY, ROUTER = "of-the-account", "router-0"


@pytest.fixture(autouse=True)
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrimeService]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with restored(monkeypatch), prime_service.serving(PrimeService(tmp_path / "box", KEY)) as service:
        monkeypatch.setenv("PRIME_API_BASE_URL", service.url)
        monkeypatch.setenv("PRIME_API_KEY", KEY)
        yield service


def recipe(directory: Path, **runtime: Any) -> Recipe:
    """A recipe whose sandbox reaches the model through a port of this host."""
    tiny_model.tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tunnel = {"type": "custom", "url": f"http://127.0.0.1:{port}", "port": port}
    args = {"path": str(EXAMPLES), "env": {"interception": {"type": "server", "tunnel": tunnel}}}
    environment = {"id": "harbor-local", "args": args, "harness": {"id": "shell"}}
    environment["runtime"] = {"type": "prime", "image": "python:3.12", **runtime}
    fields: dict[str, Any] = {"name": "x", "max_steps": 1, "seq_len": 65536, "model": {"path": str(directory)}}
    fields["orchestrator"] = {"batch_size": 8, "group_size": 4, "request_timeout_s": 60}
    return Recipe.model_validate({**fields, "environments": [environment]})


async def played(made: Recipe, engine: ScriptedEngine) -> Rollout:
    (environment,) = made.environments
    worker = Worker(made, environment, 0, "inproc://nobody", AddressBook(Path("/nowhere")), Path("/nowhere"))
    async with serving(worker._env) as clients:
        client = TokenClient(ROUTER, lambda: engine.url, made.model.path, made.max_len, 60)
        worker._clients[ROUTER] = clients[client.key] = client
        (rollout,) = await worker._rollout(Job("j", "g", environment.label, 0, 3, ROUTER, "run.1:3"))
    return rollout


async def test_harbor_task_is_set_up_solved_and_graded_at_the_provider(provider: PrimeService, tmp_path: Path) -> None:
    limits = {"cpus": 2, "memory_gb": 4, "disk_gb": 3, "network": "none"}
    own = {"region": "eu", "labels": ["mine"], "idle_timeout": 600, "gpu": "A100:2"}
    made = recipe(tmp_path / "model", limits=limits, **own)
    with ScriptedEngine(tmp_path / "model", [tool_call("sh", command=SOLUTION), "Done."]) as engine:
        engine.version = 3
        rollout = await played(made, engine)
    assert rollout.info.reward == 1.0 and rollout.info.turns == 2
    (asked,) = provider.created
    assert (asked["docker_image"], asked["region"], asked["idle_timeout_minutes"]) == ("python:3.12", "eu", 10)
    assert (asked["cpu_cores"], asked["memory_gb"], asked["disk_size_gb"]) == (2, 4, 3)
    assert (asked["gpu_type"], asked["gpu_count"]) == ("A100", 2)
    assert "mine" in asked["labels"] and len(asked["labels"]) == 2, "the run's id is one, too"
    assert [each["allowlist"] for each in provider.policies] == [["127.0.0.1"], None], "open again for its tests"
    assert provider.deleted == [prime_service.ID]
    assert KEY not in "".join((*provider.commands, json.dumps(provider.created)))


async def test_wrong_key_is_an_error_of_the_rollout(provider: PrimeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_API_KEY", "another")
    with pytest.raises(SandboxError, match="provisioning failed"):
        async with provision_runtime(PrimeConfig()):
            pass
    assert provider.created == []

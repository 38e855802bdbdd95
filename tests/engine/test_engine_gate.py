"""A real engine behind its gate."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from primeslurm.orchestrator.weight_transfer.engine_client import (
    EngineDownError,
    EngineUnresponsiveError,
    PolicyVersion,
    Step,
)
from primeslurm.plan.placement.inference import teacher_recipe
from primeslurm.recipe import Recipe
from primeslurm.wire.transport import secret
from tests.engine.conftest import ConnectEngine, StartEngine
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, spans
from tests.support.models import make_model, publish
from tests.support.processes import EngineForks, Server
from tests.support.recipes import recipe_data
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine


async def test_engine_serves_nothing_before_its_policy_is_confirmed(
    start_engine: StartEngine, client: ConnectEngine, model: Path
) -> None:
    engine = start_engine()
    control = client(engine)
    assert engine.status_code("/health") == 503
    refused = httpx.post(f"{engine.url}/inference/v1/generate", json={}, headers=secret.header())
    assert refused.status_code == 503 and refused.json()["error"].startswith("stale")
    assert engine.status_code("/metrics") == 200
    assert (await control.status()).version is None

    assert await control.apply(PolicyVersion(0, str(model)), timeout_s=600) is Step.CONFIRM
    assert engine.status_code("/health") == 200
    assert spans(generate(engine.url, [2, 3, 4], 3)) == [(0, 0, 3)]
    assert await control.apply(PolicyVersion(0, str(model)), timeout_s=600) is Step.NOTHING


async def test_shutdown_ends_the_process_and_a_new_start_is_stale(
    start_engine: StartEngine, client: ConnectEngine, model: Path
) -> None:
    engine = start_engine()
    control = client(engine)
    await control.apply(PolicyVersion(0, str(model)), timeout_s=600)
    before = await control.status()
    await control.shutdown()
    assert engine.wait_gone(600)
    with pytest.raises(EngineDownError):
        await control.status()

    start_engine(http=int(engine.url.rpartition(":")[2]))
    after = await control.status()
    assert after.incarnation != before.incarnation
    assert after.version is None and engine.status_code("/health") == 503


async def test_policy_changes_during_generation(
    start_engine: StartEngine, client: ConnectEngine, model: Path, tmp_path: Path
) -> None:
    engine = start_engine()
    control = client(engine)
    first = publish(make_model(tmp_path / "m1", seed=1), tmp_path, 1)
    assert await control.apply(PolicyVersion(1, str(first)), timeout_s=600) is Step.UPDATE
    status = await control.status()
    assert status.version == 1 and not status.paused and status.updates == 1


async def test_stopped_core_is_detected(start_engine: StartEngine, client: ConnectEngine, model: Path) -> None:
    """vLLM's server still answers 200 on `/health` while its core is stopped or hangs in a collective."""
    engine = start_engine()
    control = client(engine)
    await control.apply(PolicyVersion(0, str(model)), timeout_s=600)
    before = await control.status()
    cores = [child.pid for child in psutil.Process(engine.pid).children() if "EngineCore" in child.name()]
    assert len(cores) == 1
    os.kill(cores[0], signal.SIGSTOP)
    try:
        wait_for_status(engine, 504)
        assert engine.status_code("/health") == 504
        with pytest.raises(EngineUnresponsiveError, match=r"core has not answered its HTTP server for \d+ s"):
            await control.status()
        refused = httpx.post(f"{engine.url}/inference/v1/generate", json={}, headers=secret.header())
        assert refused.status_code == 503 and refused.json()["error"].startswith("unresponsive")
    finally:
        os.kill(cores[0], signal.SIGCONT)
    wait_for_status(engine, 200)
    assert await control.status() == before and engine.status_code("/health") == 200
    assert spans(generate(engine.url, [2, 3, 4], 3)) == [(0, 0, 3)]


def test_stopped_core_of_a_teacher_is_detected(engine_forks: EngineForks, model: Path) -> None:
    """A teacher's command has the probe route, although its weights are never updated."""
    teacher = {"type": "engines", "path": str(model), "dtype": "float32", "kv_cache_bytes": 2**24}
    alone = teacher_recipe(Recipe.model_validate(recipe_data(orchestrator={"advantages": "opd"}, teacher=teacher)))
    assert alone is not None
    engine = engine_forks.start(engine_command(alone, "cpu", "engine", sys.executable))
    try:
        engine.wait("/health")
        cores = [child.pid for child in psutil.Process(engine.pid).children() if "EngineCore" in child.name()]
        assert len(cores) == 1
        os.kill(cores[0], signal.SIGSTOP)
        wait_for_status(engine, 504, "/health")
        refused = httpx.post(f"{engine.url}/v1/completions", json={}, headers=secret.header())
        assert refused.status_code == 503 and refused.json()["error"].startswith("unresponsive")
        os.kill(cores[0], signal.SIGCONT)
        wait_for_status(engine, 200, "/health")
    finally:
        engine.stop()


def wait_for_status(engine: Server, wanted: int, path: str = "/primeslurm/status") -> None:
    wait_until(lambda: engine.status_code(path) == wanted, poll_s=0.5)

"""The watchdog of the engine core behind an HTTP server. Clocks are set by hand."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from primeslurm.base.unresponsive_timer import MAX_GAP_S
from primeslurm.inference.auth import App
from primeslurm.inference.liveness_gate import PROBE_PATH, UNRESPONSIVE_S, LivenessGate
from primeslurm.inference.version_gate import VersionGate
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, EngineUnresponsiveError
from primeslurm.wire.transport import secret


class Engine:
    """A server whose core a test can make hang. Only some routes need the core."""

    folder: Path

    def __init__(self, gate: Callable[[App], LivenessGate] = VersionGate) -> None:
        self.core = asyncio.Event()
        self.core.set()
        self.questions = 0
        self.now = 0.0
        self.gate = gate(self)
        self.gate._core._clock = lambda: self.now
        transport = httpx.ASGITransport(app=self.gate)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://engine", headers=secret.header())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        self.questions += scope["path"] == PROBE_PATH
        if scope["path"] in (PROBE_PATH, "/update_weights", "/inference/v1/generate"):
            await self.core.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def look(self, seconds: int, step: float = 1.0, path: str = "/primeslurm/status") -> int:
        """Check once per step while time passes, and return the last status."""
        status = 0
        for _ in range(seconds):
            self.now += step
            for _ in range(10):  # gives tasks in this process a chance to run
                await asyncio.sleep(0)
            status = (await self.http.get(path)).status_code
        return status


@pytest.fixture
async def engine(tmp_path: Path) -> Engine:
    engine = Engine()
    engine.folder = tmp_path
    await engine.http.post("/update_weight_version", json={"new_version": "0"})
    return engine


async def test_hanging_core_closes_its_engine_until_it_answers(engine: Engine) -> None:
    assert await engine.look(60) == 200
    asked = engine.questions
    assert asked >= 30, "it is asked anew after each answer"
    engine.core.clear()
    assert await engine.look(int(UNRESPONSIVE_S)) == 200
    assert await engine.look(5) == 504
    assert engine.questions <= asked + 2, "one question at a time: they would pile up in a core that hangs"
    for path, method in (("/health", "GET"), ("/inference/v1/generate", "POST"), ("/v1/models", "GET")):
        refused = await engine.http.request(method, path)
        assert (
            refused.status_code == (504 if path == "/health" else 503)
            and "core has not answered" in refused.json()["error"]
        )
    engine.core.set()
    assert await engine.look(2) == 200
    assert (await engine.http.get("/health")).status_code == 200


async def test_hanging_core_of_a_teacher_or_served_model_is_reported() -> None:
    """Agents of such engines request `/health`, because these engines have no policy version."""
    engine = Engine(LivenessGate)
    assert await engine.look(60, path="/health") == 200 and engine.questions >= 30
    engine.core.clear()
    assert await engine.look(int(UNRESPONSIVE_S), path="/health") == 200
    assert await engine.look(5, path="/health") == 504
    refused = await engine.http.post("/v1/completions")
    assert refused.status_code == 503 and "core has not answered" in refused.json()["error"]
    engine.core.set()
    assert await engine.look(2, path="/health") == 200
    assert (await engine.http.post("/v1/completions")).status_code == 200


async def test_compiling_core_is_responsive(engine: Engine) -> None:
    """DeepGEMM's kernels, for example, take minutes to compile when an engine first needs their shapes."""
    engine.core.clear()
    with subprocess.Popen([shutil.copy("/bin/sleep", engine.folder / "ptxas"), "600"]) as compiler:
        assert await engine.look(300) == 200
        compiler.kill()
    assert await engine.look(int(UNRESPONSIVE_S) + 2) == 504


async def test_core_may_be_busy_during_a_weight_update(engine: Engine) -> None:
    """The client of the update has its own time limit."""
    engine.core.clear()
    update = asyncio.create_task(engine.http.post("/update_weights", json={}))
    assert await engine.look(600) == 200
    update.cancel()
    await asyncio.gather(update, return_exceptions=True)
    assert await engine.look(int(UNRESPONSIVE_S) + 2) == 504


async def test_suspended_server_does_not_blame_its_core(engine: Engine) -> None:
    await engine.look(2)
    engine.core.clear()
    await engine.look(1)
    assert await engine.look(3, step=3600.0) == 200
    assert engine.gate._core.unanswered_s <= 4 * MAX_GAP_S


async def test_orchestrator_sees_a_hanging_core_as_unresponsive(engine: Engine) -> None:
    client = EngineClient(lambda: "http://engine", "/model")
    client._polling = engine.http
    assert (await client.status()).version == 0
    engine.core.clear()
    await engine.look(int(UNRESPONSIVE_S) + 2)
    with pytest.raises(EngineUnresponsiveError, match=r"core has not answered its HTTP server for 1\d s"):
        await client.status()

"""A real engine behind its gate."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from primeslurm.orchestrator.weight_updates.engine_client import (
    EngineDownError,
    EngineUnresponsiveError,
    PolicyVersion,
    Step,
)
from primeslurm.wire.names import STATUS_PATH
from primeslurm.wire.transport import secret
from tests.engine.conftest import ConnectEngine, StartEngine
from tests.support.generate import generate, spans
from tests.support.models import make_model, publish
from tests.support.processes import Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine


async def test_engine_serves_only_a_confirmed_policy_also_after_a_restart(
    start_engine: StartEngine, client: ConnectEngine, model: Path, tmp_path: Path
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

    before = await control.status()
    await control.shutdown()
    assert engine.wait_gone(600)
    with pytest.raises(EngineDownError):
        await control.status()

    start_engine(http=int(engine.url.rpartition(":")[2]))
    after = await control.status()
    assert after.incarnation != before.incarnation
    assert after.version is None and engine.status_code("/health") == 503
    first = publish(make_model(tmp_path / "m1", seed=1), tmp_path, 1)
    assert await control.apply(PolicyVersion(1, str(first)), timeout_s=600) is Step.UPDATE
    status = await control.status()
    assert status.version == 1 and not status.paused and status.updates == 1


async def test_stopped_core_is_detected(engine: Server, client: ConnectEngine, model: Path, tmp_path: Path) -> None:
    """vLLM's server still answers 200 on `/health` while its core is stopped or hangs in a collective."""
    control = client(engine)
    await control.apply(PolicyVersion(10, str(publish(model, tmp_path, 10))), timeout_s=600)
    before = await control.status()
    cores = [child.pid for child in psutil.Process(engine.pid).children() if "EngineCore" in child.name()]
    assert len(cores) == 1
    os.kill(cores[0], signal.SIGSTOP)
    try:
        wait_until(lambda: engine.status_code(STATUS_PATH) == 504, poll_s=0.5)
        assert engine.status_code("/health") == 504
        with pytest.raises(EngineUnresponsiveError, match=r"core has not answered its HTTP server for \d+ s"):
            await control.status()
        refused = httpx.post(f"{engine.url}/inference/v1/generate", json={}, headers=secret.header())
        assert refused.status_code == 503 and refused.json()["error"].startswith("unresponsive")
    finally:
        os.kill(cores[0], signal.SIGCONT)
    wait_until(lambda: engine.status_code(STATUS_PATH) == 200, poll_s=0.5)
    assert await control.status() == before and engine.status_code("/health") == 200
    assert spans(generate(engine.url, [2, 3, 4], 3)) == [(10, 0, 3)]

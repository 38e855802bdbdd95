"""Weight updates of one engine, and their retries."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from primeslurm.orchestrator.weight_updates.engine_client import (
    EngineClient,
    EngineDownError,
    EngineUpdateError,
    PolicyVersion,
    Step,
)
from primeslurm.wire.weight_transfer.messages import SessionPlace

STATUS = {"version": 3, "incarnation": "a", "paused": False, "updates": 1, "initialized": True}


class Sessions:
    """Gives places, one after the other."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self._places = 0

    async def join(self, version: int, engine: str) -> SessionPlace:
        self._places += 1
        return SessionPlace(version, "node:29500", f"session {self._places - 1}", 2, 10, 6, 60.0)

    def leave(self, session: str, reason: str) -> None:
        self.left.append(f"{session}: {reason}")


class Engine:
    """Answers like an engine whose first updates fail, or which is gone when it is asked for something."""

    def __init__(self, failures: int = 0, lost_at: str = "", silent_at: str = "") -> None:
        self.sessions = Sessions()
        self.asked: list[str] = []
        self.infos: list[dict[str, Any]] = []
        self._failures = failures
        self._lost_at = lost_at
        self._silent_at = silent_at

    def client(self, *_: object, **__: object) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/primeslurm/status":
            return httpx.Response(200, json=STATUS)
        self.asked.append(path)
        if path == self._silent_at:
            await asyncio.sleep(60)
        if path == "/update_weights":
            self.infos.append(json.loads(request.content)["update_info"])
        if path == self._lost_at:
            raise httpx.ConnectError("gone")
        if path == "/update_weights" and len(self.infos) <= self._failures:
            return httpx.Response(500, text=f"failure {len(self.infos)}")
        return httpx.Response(200)


async def apply(engine: Engine, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 30, **options: Any) -> Step:
    monkeypatch.setattr("primeslurm.orchestrator.weight_updates.engine_client.internal_client", engine.client)
    monkeypatch.setattr("primeslurm.orchestrator.weight_updates.engine_client.RETRY_S", 0.0)
    control = EngineClient(lambda: "http://engine", "/model", engine.sessions, **options)
    return await control.apply(PolicyVersion(4, ""), timeout_s)


async def test_failed_update_is_retried_in_another_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(failures=2)
    assert await apply(engine, monkeypatch) is Step.UPDATE
    place = {"version": 4, "store": "node:29500", "senders": 2, "size": 10, "first_rank": 6, "timeout_s": 60.0}
    assert engine.infos == [{**place, "session": f"session {number}"} for number in range(3)]
    updates = ["/start_weight_update", "/update_weights"]
    assert engine.asked == ["/pause", *updates, *updates, *updates, "/finish_weight_update", "/resume"]
    error = "http://engine: EngineUpdateError: http://engine/update_weights: 500 failure"
    assert engine.sessions.left == [f"session 0: {error} 1", f"session 1: {error} 2"]


async def test_adapter_is_read_before_the_engine_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(failures=1)
    assert await apply(engine, monkeypatch, adapter=True) is Step.UPDATE
    updates = ["/start_weight_update", "/update_weights"]
    assert engine.asked == [*updates, *updates, "/pause", "/finish_weight_update", "/resume"]


async def test_encoder_cache_is_reset_before_the_version_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(failures=1)
    assert await apply(engine, monkeypatch, trains_encoder=True) is Step.UPDATE
    again = ["/start_weight_update", "/update_weights", "/reset_encoder_cache", "/finish_weight_update", "/resume"]
    assert engine.asked == ["/pause", "/start_weight_update", "/update_weights", *again]


async def test_engine_stays_paused_after_the_last_failed_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(failures=9)
    with pytest.raises(EngineUpdateError, match="500 failure 3"):
        await apply(engine, monkeypatch)
    assert len(engine.infos) == 3 and "/resume" not in engine.asked


@pytest.mark.parametrize("at", ["/pause", "/start_weight_update", "/update_weights"])
async def test_missing_engine_leaves_its_session_without_a_retry(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(lost_at=at)
    with pytest.raises(EngineDownError, match="gone"):
        await apply(engine, monkeypatch)
    assert engine.asked.count(at) == 1
    (left,) = engine.sessions.left
    assert left.startswith("session 0: http://engine: ") and "gone" in left


async def test_unresponsive_engine_leaves_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(silent_at="/pause")
    with pytest.raises(EngineUpdateError, match="longer than"):
        await apply(engine, monkeypatch, timeout_s=0.5)
    assert engine.sessions.left == ["session 0: http://engine: CancelledError"]

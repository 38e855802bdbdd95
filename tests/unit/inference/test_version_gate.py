"""The version gate, around an application with given responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from primeslurm.inference.version_gate import VersionGate
from primeslurm.wire import cache_salt
from primeslurm.wire.transport import secret
from primeslurm.wire.weight_transfer import filesystem


class FakeEngineApp:
    """Answers 200 to everything, unless a test sets another status or an exception."""

    def __init__(self) -> None:
        self.answers: dict[str, int | Exception] = {}
        self.seen: list[str] = []
        self.body = b""  # of the last request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.body = (await receive()).get("body", b"")
        self.seen.append(scope["path"])
        answer = self.answers.get(scope["path"], 200)
        if isinstance(answer, Exception):
            raise answer
        await send({"type": "http.response.start", "status": answer, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def app() -> FakeEngineApp:
    return FakeEngineApp()


@pytest.fixture
def http(app: FakeEngineApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=VersionGate(app), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://engine", headers=secret.header())


async def update(http: httpx.AsyncClient, version: int) -> None:
    await http.post("/start_weight_update")
    await http.post("/update_weights", json={"update_info": {}})
    await http.post("/finish_weight_update", json={"weight_version": str(version)})


async def status(http: httpx.AsyncClient) -> dict[str, Any]:
    return (await http.get("/primeslurm/status")).json()


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/completions", "/inference/v1/generate"])
async def test_gate_is_closed_until_a_version_is_set(http: httpx.AsyncClient, app: FakeEngineApp, path: str) -> None:
    refused = await http.get(path)
    assert refused.status_code == 503 and refused.json()["error"].startswith("stale: ")
    assert app.seen == []
    await http.post("/update_weight_version", json={"new_version": "0"})
    assert (await http.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/pause", "/resume", "/is_paused", "/metrics", "/weight_info", "/server_info"])
async def test_control_routes_always_pass(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 200


async def test_status_follows_an_update(http: httpx.AsyncClient) -> None:
    fresh = await status(http)
    assert (fresh["version"], fresh["updates"], fresh["initialized"], fresh["paused"]) == (None, 0, False, False)
    await http.post("/init_weight_transfer_engine", json={"init_info": {}})
    await http.post("/pause?mode=keep")
    await update(http, 7)
    assert await status(http) == {**fresh, "version": 7, "updates": 1, "initialized": True, "paused": True}
    await http.post("/resume")
    assert not (await status(http))["paused"]


async def test_gate_is_open_during_an_update_without_a_version(http: httpx.AsyncClient) -> None:
    await update(http, 1)
    await http.post("/start_weight_update")
    assert (await http.get("/health")).status_code == 200
    assert (await status(http))["version"] is None


@pytest.mark.parametrize("step", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("failure", [500, RuntimeError("worker died")])
async def test_failed_update_closes_the_gate(
    http: httpx.AsyncClient, app: FakeEngineApp, step: str, failure: int | Exception
) -> None:
    await update(http, 1)
    app.answers[step] = failure
    for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
        answer = await http.post(path, content=json.dumps({"weight_version": "2"}))
        if answer.status_code != 200:
            break
    assert (await status(http))["version"] is None
    assert (await http.get("/health")).status_code == 503
    app.answers.clear()
    await update(http, 2)
    assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{}", b'{"weight_version": "default"}', b"[]"])
async def test_update_without_a_version_closes_the_gate(http: httpx.AsyncClient, body: bytes) -> None:
    await update(http, 1)
    await http.post("/finish_weight_update", content=body)
    assert (await status(http))["version"] is None


async def test_open_gate_forwards_an_unhealthy_status(http: httpx.AsyncClient, app: FakeEngineApp) -> None:
    await update(http, 1)
    app.answers["/health"] = 503
    assert (await http.get("/health")).status_code == 503


async def test_every_start_has_its_own_incarnation(app: FakeEngineApp) -> None:
    seen = set()
    for _ in range(2):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=VersionGate(app)), base_url="http://engine"
        ) as http:
            seen.add((await status(http))["incarnation"])
    assert len(seen) == 2


CONTROL = ("/pause", "/update_weights", "/primeslurm/shutdown", "/sleep", "/v1/load_lora_adapter", "/docs", "//health")


@pytest.mark.parametrize("shown", [None, "", "Bearer ", "Bearer wrong", "Basic x", secret.own_secret()])
@pytest.mark.parametrize("path", [*CONTROL, "/v1/completions", "/inference/v1/generate"])
async def test_without_the_secret_only_health_and_metrics_answer(
    http: httpx.AsyncClient, app: FakeEngineApp, path: str, shown: str | None
) -> None:
    await http.post("/update_weight_version", json={"new_version": "0"})
    app.seen.clear()
    http.headers.pop("Authorization")
    headers = {} if shown is None else {"Authorization": shown}
    assert (await http.post(path, headers=headers)).status_code == 401
    assert (await http.post("/health", headers=headers)).status_code == 401
    assert app.seen == []
    assert [(await http.get(p, headers=headers)).status_code for p in ("/health", "/metrics")] == [200, 200]


async def test_generate_token_opens_only_generation(http: httpx.AsyncClient) -> None:
    await http.post("/update_weight_version", json={"new_version": "0"})
    http.headers["Authorization"] = f"Bearer {secret.generate_token(secret.own_secret())}"
    assert (await http.post("/inference/v1/generate")).status_code == 200
    assert [(await http.post(path)).status_code for path in CONTROL] == [401] * len(CONTROL)


async def test_a_websocket_is_refused(app: FakeEngineApp) -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    await VersionGate(app)({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert app.seen == []


def test_gate_without_a_secret_does_not_start(app: FakeEngineApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secret.VARIABLE)
    with pytest.raises(secret.SecretError):
        VersionGate(app)


def generate(version: int | str, tokens: int = 2, first: bool = False) -> bytes:
    """Return a rollout's request. Routers write the salt before or after the tokens."""
    salt, rest = {"cache_salt": f"run-1.2:{version}"}, {"token_ids": [7] * tokens, "sampling_params": {}}
    return json.dumps({**salt, **rest} if first else {**rest, **salt}).encode()


GENERATE = "/inference/v1/generate"


@pytest.mark.parametrize("first", [True, False])
async def test_engine_closes_when_a_request_needs_a_newer_policy(
    http: httpx.AsyncClient, app: FakeEngineApp, first: bool
) -> None:
    await http.post("/update_weight_version", json={"new_version": "3"})
    assert (await http.post(GENERATE, content=generate(3, first=first))).status_code == 200
    seen = len(app.seen)
    refused = await http.post(GENERATE, content=generate(4, tokens=300_000, first=first))
    assert refused.status_code == 503 and "needs policy version 4" in refused.json()["error"]
    assert (await http.post(GENERATE, content=generate(3))).status_code == 503, "whoever asks"
    assert (await http.get("/health")).status_code == 503, "so that its router leaves it out"
    assert len(app.seen) == seen and (await status(http))["version"] == 3
    await update(http, 4)
    assert (await http.get("/health")).status_code == 200
    assert (await http.post(GENERATE, content=generate(4))).status_code == 200


async def test_engine_serves_an_older_policy_after_a_rollback(http: httpx.AsyncClient) -> None:
    await http.post("/update_weight_version", json={"new_version": "4"})
    assert (await http.post(GENERATE, content=generate(4))).status_code == 200
    assert (await http.post(GENERATE, content=generate(5))).status_code == 503
    await update(http, 3)
    assert (await http.get("/health")).status_code == 200
    assert (await http.post(GENERATE, content=generate(3))).status_code == 200
    assert (await http.post(GENERATE, content=generate(4))).status_code == 503, "it does not have that one any more"
    assert (await http.get("/health")).status_code == 503


async def test_requests_for_a_version_wait_for_its_update(http: httpx.AsyncClient) -> None:
    await http.post("/update_weight_version", json={"new_version": "3"})
    await http.post("/pause")
    await http.post("/start_weight_update")
    assert (await http.post(GENERATE, content=generate(4))).status_code == 503
    await http.post("/update_weights", json={"update_info": {}})
    await http.post("/finish_weight_update", json={"weight_version": "4"})
    assert (await http.post(GENERATE, content=generate(4))).status_code == 200


async def test_salt_of_an_evaluation_ends_with_the_version(http: httpx.AsyncClient) -> None:
    await http.post("/update_weight_version", json={"new_version": "3"})
    for body in (generate("evaluation-9:3"), generate("x"), b"", b"{}", b'{"cache_salt": 9}'):
        assert (await http.post(GENERATE, content=body)).status_code == 200, body
    text = json.dumps({"content_parts": [{"text": '"cache_salt":"r:9"'}], "cache_salt": "run.1:3"})
    assert (await http.post(GENERATE, content=text)).status_code == 200, "what a prompt says is no salt"
    assert (await http.post(GENERATE, content=generate("evaluation-9:5"))).status_code == 503


async def test_hidden_salt_is_revealed_to_engine_and_gate(http: httpx.AsyncClient, app: FakeEngineApp) -> None:
    await http.post("/update_weight_version", json={"new_version": "3"})
    for version, code in ((3, 200), (4, 503)):
        request = json.loads(generate(version))
        assert (await http.post(GENERATE, json=cache_salt.hide(request))).status_code == code
        assert json.loads(app.body) == request or code == 503


async def test_response_names_its_engine(http: httpx.AsyncClient, app: FakeEngineApp) -> None:
    await http.post("/update_weight_version", json={"new_version": "0"})
    for code in (200, 500):
        app.answers[GENERATE] = code
        answer = await http.post(GENERATE, content=generate(0))
        assert answer.status_code == code and answer.headers["X-Primeslurm-Engine"] == "engine:None"


async def test_body_in_chunks_reaches_the_engine() -> None:
    got: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        if scope["path"] == GENERATE:
            got.append(message["body"])
            assert not message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=VersionGate(app)), base_url="http://engine", headers=secret.header()
    )
    await client.post("/update_weight_version", json={"new_version": "0"})

    async def chunks() -> Any:
        for part in (b'{"token_ids": [1,', b" 2], ", b'"cache_salt": "r:0"}'):
            yield part

    await client.post(GENERATE, content=chunks())
    assert got == [b'{"token_ids": [1, 2], "cache_salt": "r:0"}']
    await client.aclose()


@pytest.mark.parametrize("version", [0, 3])
async def test_adapter_is_read_before_workers_are_asked_to(
    http: httpx.AsyncClient, app: FakeEngineApp, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(filesystem, "read_ahead", lambda path: read.append(path) or app.seen.append("read"))
    info = {"version": version, "path": "/run/v3", "adapter": True}
    await http.post("/update_weights", json={"update_info": info})
    await http.post("/update_weights", json={"update_info": {**info, "adapter": False}})
    assert read == [Path("/run/v3")] * (version > 0), "version 0 has no files"
    assert app.seen == ["read"] * (version > 0) + ["/update_weights", "/update_weights"]


async def test_unreadable_adapter_is_left_to_the_workers(http: httpx.AsyncClient, app: FakeEngineApp) -> None:
    directory = "/missing\0"  # no path can contain this character
    answer = await http.post(
        "/update_weights", json={"update_info": {"version": 1, "path": directory, "adapter": True}}
    )
    assert answer.status_code == 200 and app.seen == ["/update_weights"]

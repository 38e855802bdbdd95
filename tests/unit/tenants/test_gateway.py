"""The gateway behind its gate, with an application in place of the deployment's router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from primeslurm.inference.version_gate import VersionGate
from primeslurm.recipe.sections.tenant import Tenant
from primeslurm.tenants.gateway import Gateway, TokenBudget
from primeslurm.wire.names import ENGINE_HEADER, GENERATE
from primeslurm.wire.transport import secret

ADAPTERS = "/shared/adapters"
BODY = {"model": None, "token_ids": [1, 2], "cache_salt": "run:0", "sampling_params": {"max_tokens": 4}}
ANSWER = {"request_id": "r", "choices": [{"index": 0, "token_ids": [7, 8, 9], "logprobs": {"content": []}}]}


class FakeDeployment:
    """Answers generate requests, once `go` is set."""

    def __init__(self) -> None:
        self.answer: httpx.Response | Exception | None = None
        self.requests: list[httpx.Request] = []
        self.running = self.busiest = self.cancelled = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.running += 1
        self.busiest = max(self.busiest, self.running)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or httpx.Response(200, json=ANSWER)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]


@pytest.fixture
async def deployment() -> FakeDeployment:
    return FakeDeployment()


def gateway(deployment: FakeDeployment, **quotas: Any) -> Gateway:
    http = httpx.AsyncClient(
        transport=httpx.MockTransport(deployment), headers={"Authorization": "Bearer deployments-token"}
    )
    tenant = Tenant(service="http://service", router="http://router:1/", adapters=ADAPTERS, **quotas)
    return Gateway(tenant, http)


@pytest.fixture
async def http(deployment: FakeDeployment) -> AsyncIterator[httpx.AsyncClient]:
    async with client(gateway(deployment)) as made:
        yield made


def client(app: Gateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=VersionGate(app)), base_url="http://gateway:20000", headers=secret.header()
    )


async def update(http: httpx.AsyncClient, version: int, path: str = f"{ADAPTERS}/s:train:0/v1") -> httpx.Response:
    """Update the gateway as the orchestrator updates an engine."""
    await http.post("/init_weight_transfer_engine", json={"init_info": {}})
    await http.post("/pause?mode=keep&clear_cache=false")
    await http.post("/start_weight_update")
    info = {"version": version, "path": path, "adapter": False}
    if (answer := await http.post("/update_weights", json={"update_info": info})).is_success:
        answer = await http.post("/finish_weight_update", json={"weight_version": str(version)})
    await http.post("/resume")
    return answer


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_gateway_is_an_engine_with_the_version_that_was_announced(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == (await http.post(GENERATE, json=BODY)).status_code == 503
    assert (await http.post("/update_weight_version", json={"new_version": "0"})).status_code == 200
    assert (await http.get("/health")).status_code == 200
    await update(http, 4)
    status = (await http.get("/primeslurm/status")).json()
    assert (status["version"], status["updates"], status["initialized"], status["paused"]) == (4, 1, True, False)


async def test_request_names_the_adapter_of_the_version_with_which_it_began(
    http: httpx.AsyncClient, deployment: FakeDeployment
) -> None:
    await http.post("/update_weight_version", json={"new_version": "0"})
    deployment.go.clear()
    first = asyncio.create_task(http.post(GENERATE, json=BODY))
    await until(lambda: deployment.requests)
    await update(http, 3)
    deployment.go.set()
    answers = [await first, await http.post(GENERATE, json=BODY, headers={"X-Session-ID": "trace-1"})]
    assert [body["model"] for body in deployment.bodies] == ["policy", "s:train:0/v1"]
    assert [{**body, "model": None} for body in deployment.bodies] == [BODY, BODY]
    spans = [answer.json()["choices"][0]["weight_versions"] for answer in answers]
    assert spans == [[{"version": version, "start": 0, "end": 3}] for version in ("0", "3")]
    assert [answer.headers[ENGINE_HEADER] for answer in answers] == ["gateway:20000"] * 2
    sent = deployment.requests[-1].headers
    assert (sent["authorization"], sent["x-session-id"]) == ("Bearer deployments-token", "trace-1")


@pytest.mark.parametrize("path", ["/elsewhere/v1", f"{ADAPTERS}/../v1", "v1"])
async def test_adapter_outside_the_directory_is_refused(http: httpx.AsyncClient, path: str) -> None:
    await update(http, 1)
    assert (await update(http, 2, path)).status_code == 400
    assert (await http.get("/health")).status_code == 503


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (httpx.Response(503, json={"error": "no engine"}), 503),
        (httpx.Response(404, json={"error": "no adapter"}), 404),
        (httpx.Response(400, json={"error": "too long"}), 400),
        (httpx.Response(500, json={"error": "an engine failed"}), 502),
        (httpx.ConnectError("refused"), 502),
        (httpx.Response(200, content=b"[1"), 502),
        (httpx.Response(200, json={"choices": [{}]}), 502),
    ],
    ids=str,
)
async def test_failure_of_the_deployment_is_passed_on_and_not_the_gateways(
    http: httpx.AsyncClient, deployment: FakeDeployment, answer: httpx.Response | Exception, status: int
) -> None:
    await update(http, 1)
    deployment.answer = answer
    passed = await http.post(GENERATE, json=BODY)
    assert (passed.status_code, len(deployment.requests)) == (status, 1) and passed.json()["error"]
    deployment.answer = None
    assert (await http.post(GENERATE, json=BODY)).status_code == 200


async def test_requests_above_the_limit_wait(deployment: FakeDeployment) -> None:
    async with client(gateway(deployment, max_inflight=2)) as http:
        await update(http, 1)
        deployment.go.clear()
        tasks = [asyncio.create_task(http.post(GENERATE, json=BODY)) for _ in range(5)]
        await until(lambda: deployment.running == 2)
        deployment.go.set()
        assert [(await task).status_code for task in tasks] == [200] * 5
        assert deployment.busiest == 2


async def test_request_of_a_client_that_left_is_dropped(deployment: FakeDeployment) -> None:
    app, sent = gateway(deployment), list[Any]()
    deployment.go.clear()
    messages = [{"type": "http.request", "body": json.dumps(BODY).encode()}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await until(lambda: deployment.running)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": GENERATE, "headers": []}, receive, send)
    await until(lambda: deployment.cancelled)
    assert sent == []


def test_requests_wait_until_earlier_tokens_are_paid_for() -> None:
    now = 100.0
    budget = TokenBudget(10.0, lambda: now)
    assert budget.wait_s == 0
    budget.spend(5)
    budget.spend(20)
    assert budget.wait_s == 2.5
    now = 110.0
    assert budget.wait_s == 0
    budget.spend(1)  # time without requests is not saved up
    assert budget.wait_s == pytest.approx(0.1)
    unlimited = TokenBudget(None, lambda: now)
    unlimited.spend(10**9)
    assert unlimited.wait_s == 0

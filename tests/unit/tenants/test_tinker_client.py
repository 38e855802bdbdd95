"""The client of the Tinker API, with an application in place of the service."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from primeslurm.tenants import tinker_client
from primeslurm.tenants.tinker_client import TinkerClient
from primeslurm.tinker import routes

PENDING = httpx.Response(408, json={"type": "try_again"})
DONE = httpx.Response(200, json={"model_id": "s:train:0"})


class Service:
    """Answers polls with the given answers, and counts time by requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *polls: httpx.Response, seconds: float = 0.0) -> None:
        self.polls, self.seconds, self.now = iter(polls), seconds, 0.0
        self.sent: list[dict[str, Any]] = []
        self.waits = 0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _: None)
        monkeypatch.setattr(tinker_client, "time", clock)
        http = httpx.Client(transport=httpx.MockTransport(self), base_url="http://service")
        self.client = TinkerClient(http, self.wait)

    def wait(self) -> None:
        self.waits += 1

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("retrieve_future"):
            return httpx.Response(200, json={"request_id": "s:train:0:0"})
        self.now += self.seconds
        self.sent.append(json.loads(request.content))
        return next(self.polls)


def test_result_is_awaited_while_the_service_says_that_it_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch, *[PENDING] * 5, DONE, seconds=0.6 * tinker_client.UNREACHABLE_S)
    service.client.create("model", 8, 0)
    assert service.waits == 7, "the caller's heartbeats are sent before each request"
    assert {each["wait_s"] for each in service.sent} == {tinker_client.POLL_S}


@pytest.mark.parametrize("kind", ["application/json", "application/x-protobuf"])
def test_damaged_answer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    damaged = httpx.Response(200, content=b'{"model_id": "s:tr', headers={"Content-Type": kind})
    service = Service(monkeypatch, damaged, damaged, DONE)
    service.client.create("model", 8, 0)
    assert len(service.sent) == 3
    service = Service(monkeypatch, damaged, damaged, seconds=0.6 * tinker_client.UNREACHABLE_S)
    with pytest.raises(ConnectionError, match="retrieve_future: DecodeError"):
        service.client.create("model", 8, 0)


def test_poll_is_answered_before_its_client_gives_up() -> None:
    assert tinker_client.POLL_S < routes.POLL_S < tinker_client.ANSWER_S
    assert tinker_client.connect("http://service", "key").timeout.read == tinker_client.ANSWER_S

"""The HTTP servers of a run: engines and teachers behind their gates (uvicorn, as in vLLM)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.inference.auth import App, Message, Receive, Scope, SecretGate, Send, answer
from primeslurm.inference.liveness_gate import LivenessGate
from primeslurm.inference.version_gate import LARGEST_CONTROL, GateState, VersionGate
from primeslurm.wire.transport import secret
from tests.unit.fuzz.mutations import fuzzed, texts, trees

GENERATE = "/inference/v1/generate"
ASKED: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
CONTROL = {
    "/finish_weight_update": {"weight_version": "3"},
    "/update_weight_version": {"new_version": "3"},
    "/update_weights": {"update_info": {"version": 3, "path": "/x"}},
    "/start_weight_update": {},
    "/pause": {},
    "/resume": {},
    "/v1/completions": {"prompt": [1, 2, 3]},
    GENERATE: ASKED,
}


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, and answer 200."""
    if scope["type"] == "lifespan":
        return
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    await answer(send, 200, {})


class Server:
    """Serves in its own thread until `stop`."""

    def __init__(self, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(serve(self._listening))  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(60)


def real(gate: Callable[[App], SecretGate]) -> Callable[[socket.socket], Awaitable[None]]:
    async def serve(listening: socket.socket) -> None:
        options = uvicorn.Config(gate(behind), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        await uvicorn.Server(options)._serve([listening])

    return serve


KINDS = {
    "engine": real(VersionGate),
    "teacher": real(LivenessGate),
}


@pytest.fixture(scope="module", params=list(KINDS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    found = Server(KINDS[request.param])
    wait(found)
    ask(found, request_of("/update_weight_version", {"new_version": "0"}))
    yield found
    assert found.alive, "it served to the end"
    found.stop()


def wait(server: Server) -> None:
    """Wait until the server answers."""
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
            peer.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            if peer.recv(1):
                return
        threading.Event().wait(0.05)
    raise AssertionError("it does not answer")


def request_of(path: str, body: Any, method: str = "POST") -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body, default=lambda each: each.decode("latin-1")).encode()
    shown = secret.header()["Authorization"]
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: {shown}\r\nconnection: close\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


def ask(server: Server, data: bytes, *, whole: bool = True) -> bytes:
    """Return its response until it disconnects. An incomplete request (not `whole`) may get none, because it waits for
    more.
    """
    found = b""
    patience_s = 120 if whole else 20  # a complete request always gets a response, however late
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience_s) as peer, contextlib.suppress(OSError):
        peer.sendall(data)
        if not whole:
            peer.shutdown(socket.SHUT_WR)
        while chunk := peer.recv(65536):
            found += chunk
    return found


def is_served(server: Server) -> None:
    assert ask(server, request_of("/resume", {})).startswith(b"HTTP/1.1 200")


@fuzzed(0.5)
@given(st.sampled_from(sorted(CONTROL)).flatmap(lambda path: st.tuples(st.just(path), trees(CONTROL[path]))))
def test_invalid_request_bodies(server: Server, asked: tuple[str, Any]) -> None:
    assert ask(server, request_of(*asked)).startswith(b"HTTP/1.1 ")
    ask(server, request_of("/update_weight_version", {"new_version": "0"}))
    is_served(server)


@fuzzed(0.5)
@given(texts(request_of(GENERATE, ASKED)))
def test_invalid_requests(server: Server, data: bytes) -> None:
    found = ask(server, data, whole=False)
    assert not found or found.startswith(b"HTTP/1.1 ")
    is_served(server)


@pytest.mark.parametrize(
    "data",
    [
        b"POST /pause HTTP/1.1\r\nhost: x\r\ncontent-length: 1099511627776\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50_000,
        b"\0" * 100_000,
    ],
)
def test_strangers_cannot_exhaust_a_workers_memory(server: Server, data: bytes) -> None:
    before = psutil.Process().memory_info().rss
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer, contextlib.suppress(OSError):
        peer.settimeout(5)
        peer.sendall(data)
        for _ in range(192):
            peer.sendall(bytes(1 << 20))
    assert psutil.Process().memory_info().rss - before < 96 << 20
    is_served(server)


@fuzzed()
@given(
    st.sampled_from(["/finish_weight_update", "/update_weight_version"]),
    trees({"weight_version": "3", "new_version": "3"}).map(lambda each: json.dumps(each, default=str).encode())
    | texts(b'{"weight_version": "3", "new_version": "3"}'),
)
def test_gate_extracts_a_version_or_none(path: str, body: bytes) -> None:
    state = GateState()
    state.observe(path, body, ok=True)
    assert state.version is None or 0 <= state.version < 2**31
    assert msgspec.json.encode(state.report())


BODIES = [b"[" * 100_000, b'{"new_version": 1e999}', b'{"new_version": "1_0"}', b'{"new_version": true}']
BODIES += [b'{"new_version": %s}' % (b"9" * 400), b'{"new_version": "-1"}', b'{"new_version": NaN}']


@pytest.mark.parametrize("body", BODIES)
def test_invalid_version_closes_the_gate(body: bytes) -> None:
    state = GateState()
    state.observe("/update_weight_version", body, ok=True)
    assert state.version is None


async def test_gate_buffers_little_of_a_long_control_request() -> None:
    """The engine reads all of it. The gate only needs a version."""
    parts = iter([b'{"new_version": "3"}' + b" " * (1 << 20)] + [b" " * (1 << 20)] * 8)
    left = 9
    statuses = []

    async def receive() -> Message:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": next(parts), "more_body": left > 0}

    async def send(message: Message) -> None:
        statuses.append(message.get("status"))

    gate = VersionGate(behind)
    scope = {"type": "http", "method": "POST", "path": "/update_weight_version"}
    scope["headers"] = [(b"authorization", secret.header()["Authorization"].encode())]  # type: ignore[assignment]
    await gate(scope, receive, send)
    assert left == 0
    assert statuses[0] == 200 and gate._state.version is None and LARGEST_CONTROL == 1 << 20

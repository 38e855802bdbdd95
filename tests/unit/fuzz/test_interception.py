"""Requests of a model's program to the interception server: it gets an HTTP response, and the next one is served."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st
from renderers import create_renderer
from renderers.base import load_tokenizer
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.interception import InterceptionServer, server
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, TraceTask

from primeslurm.models.extending_renderer import extending_config
from primeslurm.orchestrator.rendering.conversation_cache import cache_conversations
from primeslurm.orchestrator.rendering.program_protocols import ROLLOUT_DIALECTS
from primeslurm.orchestrator.rendering.renderer_selection import Rendering
from primeslurm.orchestrator.worker.token_client import LARGEST_REQUEST_BYTES, TokenClient, limit_requests
from tests.support.conversations import ScriptedEngine, answering, sampled, write_tokenizer
from tests.unit.fuzz.mutations import fuzzed, texts, trees

SHORT = 1 << 20
"""Longest request [bytes] here, instead of a hundred megabytes."""
VALID = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}

_CALL = {"name": "look_up", "arguments": "{}"}
OTHERS = {
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look_up", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
        ],
        "tools": [{"name": "look_up", "input_schema": {"type": "object"}}],
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "id": "f", "call_id": "c", **_CALL},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "look_up", "parameters": {"type": "object"}}],
    },
}
"""Valid requests of the other API dialects, by route."""


class Intercepted:
    """A rollout's interception server, in its own thread until `stop`."""

    def __init__(self, directory: Path) -> None:
        config = extending_config("qwen3", {})
        self._rendering, self._model = Rendering(config), write_tokenizer(directory, config)
        tokens = sampled(create_renderer(load_tokenizer(str(self._model)), config), answering(0))
        self._engine = ScriptedEngine(_Always(tokens))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(120)

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        limit_requests()
        self.largest, server.MAX_REQUEST_BODY = server.MAX_REQUEST_BODY, SHORT
        async with self._engine.serving(), InterceptionServer() as found:
            cache_conversations(found, ROLLOUT_DIALECTS)
            client = TokenClient(
                "router", lambda: self._engine.url, str(self._model), 1 << 16, 60, rendering=self._rendering
            )
            found.clients[client.key] = client
            context = ModelContext(model="m", client=client.config, sampling=vf.SamplingConfig(cache_salt="s"))
            task = TraceTask(type="Task", data=vf.TaskData(prompt="Look it up."))
            self.found, self._context, self._task = found, context, task
            self.url = found.base_url
            self._ready.set()
            await self._stopped.wait()
            await client.close()

    def session(self) -> str:
        """Return the secret of a new rollout."""

        async def register() -> str:
            trace = vf.Trace(task=self._task, agent=AgentInfo(config=AgentConfig()))
            return self.found.register(RolloutSession(ctx=self._context, trace=trace))[0]

        return asyncio.run_coroutine_threadsafe(register(), self._loop).result(60)

    def ask(self, secret: str, content: bytes, path: str = "/v1/chat/completions") -> httpx.Response:
        headers = {"Authorization": f"Bearer {secret}"}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=120, trust_env=False)

    def serves(self) -> bool:
        return self.ask(self.session(), json.dumps(VALID).encode()).status_code == 200

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)


class _Always(list[list[int]]):
    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self._tokens = tokens

    def __getitem__(self, place: object) -> list[int]:  # type: ignore[override]
        return self._tokens


@pytest.fixture(scope="module")
def intercepted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Intercepted]:
    before = server.MAX_REQUEST_BODY
    found = Intercepted(tmp_path_factory.mktemp("qwen3"))
    yield found
    found.stop()
    server.MAX_REQUEST_BODY = before


@fuzzed(0.3)
@given(trees(VALID).map(lambda body: json.dumps(body, default=repr).encode()) | texts(json.dumps(VALID).encode()))
def test_invalid_request_gets_a_response_and_affects_no_other(intercepted: Intercepted, content: bytes) -> None:
    answer = intercepted.ask(intercepted.session(), content)
    assert 200 <= answer.status_code < 600
    assert intercepted.serves()


@pytest.mark.parametrize("path", OTHERS)
@fuzzed(0.2)
@given(data=st.data())
def test_programs_of_other_dialects_too(path: str, data: st.DataObject, intercepted: Intercepted) -> None:
    valid = OTHERS[path]
    content = data.draw(trees(valid).map(lambda body: json.dumps(body, default=repr).encode()))
    assert 200 <= intercepted.ask(intercepted.session(), content, path).status_code < 600
    assert intercepted.ask(intercepted.session(), json.dumps(valid).encode(), path).status_code == 200


@pytest.mark.parametrize("path", ["/tool", "/v1/messages", "/v1/responses", "/state", "/v1/models", "/nowhere"])
def test_other_routes_answer_too(intercepted: Intercepted, path: str) -> None:
    for content in (b"", b"[]", b"null", b'"x"', b"{", b"\xff" * 100, b"[" * 20_000):
        assert intercepted.ask(intercepted.session(), content, path).status_code >= 400
    assert intercepted.serves()


def test_oversized_request_is_refused(intercepted: Intercepted) -> None:
    assert intercepted.largest == LARGEST_REQUEST_BYTES
    long = json.dumps({**VALID, "padding": "x" * SHORT}).encode()
    assert intercepted.ask(intercepted.session(), long).status_code == 413
    assert intercepted.serves()


def test_request_without_a_secret_is_refused_before_its_body(intercepted: Intercepted) -> None:
    host, port = intercepted.url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as peer:
        peer.sendall(head)
        assert peer.recv(100).startswith(b"HTTP/1.1 401")

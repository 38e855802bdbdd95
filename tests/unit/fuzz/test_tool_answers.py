"""Responses of a broken or hostile MCP tool server.

The program gets an error, or passes what it takes for a result to the interception server. The tests use the client and
the function that verifiers' programs use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifiers.v1.harnesses.utils import mcp

from tests.unit.fuzz import test_interception
from tests.unit.fuzz.mutations import bounded, fuzzed, texts, trees
from tests.unit.fuzz.test_interception import VALID, Intercepted

intercepted = test_interception.intercepted

PATIENCE_S = 300.0
SHORT_S = 0.5
"""Programs wait for a response for as long as their rollout may take."""
ANSWERS: dict[str, dict[str, Any]] = {
    "initialize": {
        "protocolVersion": "2025-03-26",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "s", "version": "1"},
    },
    "tools/list": {"tools": [{"name": "look", "description": "Looks.", "inputSchema": {"type": "object"}}]},
    "tools/call": {
        "content": [
            {"type": "text", "text": "It is blue."},
            {"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"},
            {"type": "resource_link", "uri": "file:///etc/passwd", "name": "x"},
        ],
        "isError": False,
    },
}
UNKNOWN = {"code": -32601, "message": "Method not found"}
Change = Callable[[bytes], bytes]


class ToolServer:
    """Answers correctly, except for one method, whose HTTP response is changed by `wrong`."""

    def __init__(self, method: str, wrong: Change) -> None:
        self._method, self._wrong = method, wrong

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as found:
            yield f"http://127.0.0.1:{found.sockets[0].getsockname()[1]}/mcp"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
                asked = json.loads(await reader.readexactly(length) or b"{}")
                right = answer(asked)
                wrong = asked.get("method") == self._method
                writer.write(self._wrong(right) if wrong else right)
                await writer.drain()
                if wrong:
                    break  # otherwise the client might wait for the promised length
        writer.close()


def answer(asked: dict[str, Any]) -> bytes:
    """Return the correct response to a request, a notification, or a request for a stream."""
    if "id" not in asked:
        return b"HTTP/1.1 " + (b"202 Accepted" if asked else b"405 No") + b"\r\nContent-Length: 0\r\n\r\n"
    known = ANSWERS.get(asked["method"])
    what = {"error": UNKNOWN} if known is None else {"result": known}
    return of_json({"jsonrpc": "2.0", "id": asked["id"], **what})


def of_json(value: Any, kind: bytes = b"application/json") -> bytes:
    body = json.dumps(value, default=repr).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)


async def use(method: str, wrong: Change, patience_s: float = PATIENCE_S) -> list[dict[str, Any]] | Exception:
    """List a server's tools and call one, as a program does. Return the next messages, or the error."""
    async with (
        asyncio.timeout(patience_s),
        ToolServer(method, wrong).serving() as url,
        contextlib.AsyncExitStack() as stack,
    ):
        try:
            schemas, places, servers = await mcp.connect_mcp({"mcpServers": {"t": {"url": url, "timeout": 5}}}, stack)
            name = schemas[0]["function"]["name"]
            found = await mcp.call_mcp(servers, places, name, {"x": 1})
        except Exception as error:
            return error
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": found},
        ]


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try once, instead of six times within half a minute."""
    monkeypatch.setattr(mcp, "MCP_CALL_ATTEMPTS", 1)


async def test_correct_server_works() -> None:
    found = await use("", bytes)
    assert not isinstance(found, Exception)
    text, image, link = found[1]["content"]
    assert text["text"] == "It is blue." and "file:///etc/passwd" in link["text"]
    assert image["image_url"]["url"] == "data:image/png;base64,aGVsbG8="


@st.composite
def wrongs(draw: st.DrawFn) -> tuple[str, Change]:
    """Draw a method and its response: another result, another message, or other bytes."""
    method = draw(st.sampled_from([*ANSWERS, "tools/call", "tools/call"]))
    way = draw(st.sampled_from(["result", "result", "message", "bytes"]))
    if way == "bytes":
        return method, (lambda sample: lambda right: sample)(draw(texts(answer({"id": 3, "method": method}))))
    kind = draw(st.sampled_from([b"application/json"] * 3 + [b"text/event-stream", b"text/html", b""]))
    result, number = draw(trees(ANSWERS[method])), draw(st.integers(0, 5))
    message = draw(trees({"jsonrpc": "2.0", "id": number, "result": ANSWERS[method]}))

    def change(right: bytes) -> bytes:
        own = json.loads(right.split(b"\r\n\r\n", 1)[1])
        return of_json({**own, "result": result} if way == "result" else message, kind)

    return method, change


@fuzzed()
@given(wrongs())
def test_tool_server_affects_only_its_program(intercepted: Intercepted, wrong: tuple[str, Change]) -> None:
    with bounded(0, beside=64 << 20):
        try:
            found = asyncio.run(use(*wrong, SHORT_S))
        except TimeoutError:
            return
    if isinstance(found, Exception):
        assert str(found) or repr(found)
        return
    body = json.dumps({**VALID, "messages": [*VALID["messages"], *found]}, default=repr).encode()  # type: ignore[misc]
    assert 200 <= intercepted.ask(intercepted.session(), body).status_code < 600
    assert intercepted.serves()


TOOLS = {
    **VALID,
    "messages": [
        {"role": "user", "content": "Hello."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "It is blue."}]},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}],
}


@fuzzed(0.3)
@given(trees(TOOLS).map(lambda body: json.dumps(body, default=repr).encode()) | texts(json.dumps(TOOLS).encode()))
def test_invalid_tool_conversation_gets_a_response(intercepted: Intercepted, content: bytes) -> None:
    assert 200 <= intercepted.ask(intercepted.session(), content).status_code < 600
    assert intercepted.serves()


def test_unchanged_conversation_is_valid(intercepted: Intercepted, tmp_path: Path) -> None:
    assert intercepted.ask(intercepted.session(), json.dumps(TOOLS).encode()).status_code == 200

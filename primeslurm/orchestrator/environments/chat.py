"""The `chat` harness: one request to the model, sent by the worker's own process.

The harnesses of verifiers start a program in a sandbox for each rollout. A task that only needs the model's reply does
not need one. verifiers records the request like any other turn.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple
from weakref import WeakSet

import httpx
import msgspec
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import ProgramResult, Runtime

from primeslurm.chat import ChatMessage
from primeslurm.wire.transport.http import internal_client

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Sends the conversation and takes the reply. A taskset module selects it by naming it in `__all__`."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        # If the rollout has failed, verifiers raises its error after this method returns.
        messages = first_messages(*self.resolve_prompt(data))
        reply = await ask_model(endpoint, secret, {"model": ctx.model, "messages": messages})
        if reply.status != httpx.codes.OK:
            return ProgramResult(exit_code=1, stdout="", stderr=reply.text)
        return ProgramResult(exit_code=0, stdout=reply.text, stderr="")


class ModelReply(NamedTuple):
    """The answer of a rollout's model."""

    status: int
    text: str


async def ask_model(endpoint: str, secret: str, body: dict[str, Any]) -> ModelReply:
    """Send a request to the model of the rollout with this secret, without HTTP if its server is in this process."""
    server = next((server for server in servers_in_process if secret in server.sessions), None)
    if server is None:
        async with internal_client(None, headers={"Authorization": f"Bearer {secret}"}) as client:
            response = await client.post(f"{endpoint}/chat/completions", json=body)
            return ModelReply(response.status_code, response.text)
    # A task of its own, because the server cancels the task of an unfinished request when the rollout ends.
    # The handler of the HTTP route, because it also lets the server free the answers that it keeps for retries.
    answer = await asyncio.create_task(server._handler_for(_DIALECT)(_LocalRequest(secret, body)))
    return ModelReply(answer.status, answer.body.decode())


# The interception servers of this process, because verifiers tells a harness only the URL. `serving` adds its server.
servers_in_process: WeakSet[InterceptionServer] = WeakSet()
_DIALECT = ChatDialect()


class _LocalRequest(dict[Any, Any]):
    """The parts of aiohttp's request that the handlers of `InterceptionServer` use."""

    path = _DIALECT.routes[0]

    def __init__(self, secret: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.headers = httpx.Headers({"Authorization": f"Bearer {secret}", "Content-Type": "application/json"})
        self._body = msgspec.json.encode(body)

    async def read(self) -> bytes:
        return self._body


def first_messages(system: str | None, prompt: str | vf.Messages | None) -> list[ChatMessage]:
    """Return the messages of a conversation before the first reply, in the format of the API."""
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return messages + [message_to_wire(message) for message in prompt or []]

"""The `chat` harness: one request to the model, sent by the worker's own process.

The harnesses of verifiers start a program in a sandbox for each rollout. A task that only needs the model's reply does
not need one. verifiers records the request like any other turn.
"""

from __future__ import annotations

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire
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
        async with internal_client(None, headers={"Authorization": f"Bearer {secret}"}) as client:
            response = await client.post(
                f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}
            )
        if response.status_code != httpx.codes.OK:
            return ProgramResult(exit_code=1, stdout="", stderr=response.text)
        return ProgramResult(exit_code=0, stdout=response.text, stderr="")


def first_messages(system: str | None, prompt: str | vf.Messages | None) -> list[ChatMessage]:
    """Return the messages of a conversation before the first reply, in the format of the API."""
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return messages + [message_to_wire(message) for message in prompt or []]

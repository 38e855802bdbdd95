"""A chat loop inside the worker's own process.

The harnesses that verifiers ships start a program per rollout in a sandbox. A task that only needs the model's replies
does not need one: one request to the rollout's endpoint is one turn, and verifiers records it like any other.
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
    """Sends the conversation, takes the reply. A taskset module uses it by exporting it in `__all__`."""

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
        """Take one turn. The rollout's own error, if any, is raised by verifiers after this returns."""
        messages = opening(*self.resolve_prompt(data))
        async with internal_client(None, headers={"Authorization": f"Bearer {secret}"}) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages})
        if answer.status_code != httpx.codes.OK:
            return ProgramResult(exit_code=1, stdout="", stderr=answer.text)
        return ProgramResult(exit_code=0, stdout=answer.text, stderr="")


def opening(system: str | None, prompt: str | vf.Messages | None) -> list[ChatMessage]:
    """The messages that a conversation starts with, as they are sent."""
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return messages + [message_to_wire(message) for message in prompt or []]

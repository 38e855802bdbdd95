"""The `shell` harness: the loop runs in the worker's own process, its commands in the rollout's sandbox.

verifiers' `bash` harness starts a Python program for each rollout, which takes a second of a core before the first
request. This one starts a process only for each command.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic import PositiveInt
from verifiers.v1.clients import ModelContext
from verifiers.v1.runtimes import ProgramResult, Runtime

from primeslurm.orchestrator.environments.chat import ask_model, first_messages

__all__ = ["ShellHarness"]

NAME = "sh"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


class ShellConfig(vf.HarnessConfig):  # type: ignore[misc]
    """Options of `harness: {id: shell}` in a recipe."""

    command_timeout_s: PositiveInt = 60
    """Timeout of one command."""
    output_chars: PositiveInt = 4000
    """Most characters of a command's output that the model sees. Longer output loses its beginning."""


class ShellHarness(vf.Harness[ShellConfig]):  # type: ignore[misc]
    """Sends the conversation and runs the commands of each reply, until a reply has none.

    A taskset module selects it by naming it in `__all__`.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = True
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
        while True:
            answer = await ask_model(endpoint, secret, {"model": ctx.model, "messages": messages, "tools": [TOOL]})
            if answer.status != httpx.codes.OK:
                return ProgramResult(exit_code=1, stdout="", stderr=answer.text)
            reply = json.loads(answer.text)["choices"][0]["message"]
            calls = reply.get("tool_calls") or []
            if not calls:
                return ProgramResult(exit_code=0, stdout=reply.get("content") or "", stderr="")
            messages.append(reply)
            for call in calls:
                output = await self.run_command(call["function"], runtime)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})

    async def run_command(self, function: dict[str, Any], runtime: Runtime) -> str:
        """Run the command of a tool call. Return its output, or the error that the model sees."""
        if function["name"] != NAME:
            return f"error: no tool {function['name']}"
        try:
            command = json.loads(function["arguments"])["command"]
        except (ValueError, TypeError, KeyError, RecursionError):  # the model may write anything
            command = None
        if not isinstance(command, str):
            return "error: arguments must be a JSON object with the string command"
        try:
            async with asyncio.timeout(self.config.command_timeout_s):
                result = await runtime.run(["sh", "-c", command], self.config.resolved_env)
        except TimeoutError:
            return f"error: stopped after {self.config.command_timeout_s} s"
        except ValueError as error:  # a null character, which no argument of a program can have
            return f"error: {error}"
        output = (result.stdout + result.stderr).strip()[-self.config.output_chars :]
        return output if result.exit_code == 0 else f"{output}\nexit code {result.exit_code}".lstrip()

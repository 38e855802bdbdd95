"""Programs that speak Anthropic's Messages or OpenAI's Responses are trained. Tested with the official clients."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from renderers import create_renderer
from renderers.base import load_tokenizer
from verifiers.v1.types import AssistantMessage, FinishReason, Response, ToolCall, Usage

from primeslurm.models.extending_renderer import extending_config
from primeslurm.orchestrator.rendering.program_protocols import TrainedAnthropicMessages
from primeslurm.orchestrator.rendering.renderer_selection import Rendering
from tests.support.conversations import (
    START,
    TOOL,
    Conversation,
    Message,
    ScriptedEngine,
    answering,
    calling,
    rollout,
    sampled,
    write_tokenizer,
)
from tests.unit.orchestrator.test_turns import assert_trained_as_seen, trained

SYSTEM, ASKED = (message["content"] for message in START)
FUNCTION = TOOL["function"]
TURNS = 4
SAID = [*(calling(turn) for turn in range(TURNS - 1)), answering(TURNS - 1)]
Program = Callable[[str, str, bool, bool], Awaitable[tuple[list[str], list[dict[str, Any]]]]]
"""(address, secret, streams, resends thoughts) -> (thoughts, arguments of calls)."""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"), extending_config("qwen3", {}))


async def messages(base: str, secret: str, streams: bool, thinks_again: bool) -> tuple[list[str], list[dict[str, Any]]]:
    tool = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    conversation: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]
    thoughts, calls = [], []
    async with anthropic.DefaultAsyncHttpxClient(trust_env=False) as http:
        program = anthropic.AsyncAnthropic(base_url=base, api_key=secret, http_client=http, max_retries=0)
        options: dict[str, Any] = {"model": "m", "max_tokens": 99, "system": SYSTEM, "tools": [tool]}
        while True:
            if streams:
                async with program.messages.stream(messages=conversation, **options) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await program.messages.create(messages=conversation, **options)
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            thoughts += [block["thinking"] for block in blocks if block["type"] == "thinking"]
            used = [block for block in blocks if block["type"] == "tool_use"]
            conversation.append(
                {"role": "assistant", "content": [b for b in blocks if thinks_again or b["type"] != "thinking"]}
            )
            assert answer.stop_reason == ("tool_use" if used else "end_turn")
            assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0
            if not used:
                assert blocks[-1]["text"] == SAID[-1]["content"]
                return thoughts, calls
            calls += [block["input"] for block in used]
            results = [{"type": "tool_result", "tool_use_id": b["id"], "content": "found"} for b in used]
            conversation.append({"role": "user", "content": results})


async def responses(
    base: str, secret: str, streams: bool, thinks_again: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    tools = [{"type": "function", **FUNCTION}, {"type": "web_search"}]  # the provider would run the second: not offered
    conversation: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": ASKED}]}]
    thoughts, calls = [], []
    async with openai.DefaultAsyncHttpxClient(trust_env=False) as http:
        program = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=secret, http_client=http, max_retries=0)
        options: dict[str, Any] = {"model": "m", "instructions": SYSTEM, "tools": tools}
        while True:
            if streams:
                async with program.responses.stream(input=conversation, **options) as stream:
                    answer = await stream.get_final_response()
            else:
                answer = await program.responses.create(input=conversation, **options)
            items = [item.model_dump(exclude_none=True) for item in answer.output]
            for item in items:
                item.pop("parsed_arguments", None)
            thoughts += [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
            used = [item for item in items if item["type"] == "function_call"]
            conversation += [item for item in items if thinks_again or item["type"] != "reasoning"]
            assert answer.status == "completed" and answer.usage.total_tokens > 0
            if not used:
                assert answer.output_text == SAID[-1]["content"]
                return thoughts, calls
            calls += [json.loads(item["arguments"]) for item in used]
            conversation += [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "found"} for item in used
            ]


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "whole"])
@pytest.mark.parametrize("thinks_again", [True, False], ids=["thoughts-again", "thoughts-dropped"])
@pytest.mark.parametrize("program", [messages, responses])
async def test_other_protocols_are_trained_on_the_sampled_tokens(
    program: Program, thinks_again: bool, streams: bool, qwen3: Path
) -> None:
    config = extending_config("qwen3", {})
    renderer = create_renderer(load_tokenizer(str(qwen3)), config)
    engine = ScriptedEngine([sampled(renderer, message) for message in SAID])
    async with engine.serving(), rollout(qwen3, Rendering(config), engine) as (base, secret, ended):
        thoughts, calls = await program(base, secret, streams, thinks_again)
        conversation: Conversation = ended([])
    assert calls == [message["tool_calls"][0]["function"]["arguments"] for message in SAID[:-1]]
    assert [thought.strip() for thought in thoughts] == [message["reasoning_content"] for message in SAID]
    rollouts = trained(conversation)
    assert_trained_as_seen(rollouts, engine)
    assert len(rollouts) == 1 and rollouts[0].info.turns == TURNS
    prompt: list[Message] = list(START)
    for turn, (message, request) in enumerate(zip(SAID, engine.requests, strict=True)):
        assert request["token_ids"] == renderer.render_ids(prompt, tools=[TOOL], add_generation_prompt=True), turn
        prompt.append(message)
        prompt += [
            {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": "found"}
            for call in message.get("tool_calls", ())
        ]


@pytest.mark.parametrize(
    ("finish", "calls", "expected"),
    [
        ("tool_calls", True, "tool_use"),
        ("stop", False, "end_turn"),
        ("length", False, "max_tokens"),
        ("length", True, "max_tokens"),
    ],
)
def test_stop_reason_of_a_message(finish: FinishReason, calls: bool, expected: str) -> None:
    called = [ToolCall(id="call_0", name="look_up", arguments="{}")] if calls else None
    used = Usage(prompt_tokens=1, completion_tokens=1)
    message = AssistantMessage(content="so", tool_calls=called)
    answer = Response(id="r", created=0, model="m", message=message, finish_reason=finish, usage=used)
    assert TrainedAnthropicMessages.__new__(TrainedAnthropicMessages).written(answer)["stop_reason"] == expected


@pytest.mark.parametrize("said", ["not JSON", "[1]"])
async def test_malformed_arguments_are_sent_as_an_empty_object(said: str, qwen3: Path) -> None:
    config = extending_config("qwen3", {})
    tokenizer = load_tokenizer(str(qwen3))
    text = f'<tool_call>\n{{"name": "look_up", "arguments": {json.dumps(said)}}}\n</tool_call><|im_end|>'
    script: Sequence[Sequence[int]] = [tokenizer.encode(text, add_special_tokens=False)]
    engine = ScriptedEngine(script)
    async with engine.serving(), rollout(qwen3, Rendering(config), engine) as (base, secret, ended):
        async with anthropic.DefaultAsyncHttpxClient(trust_env=False) as http:
            program = anthropic.AsyncAnthropic(base_url=base, api_key=secret, http_client=http, max_retries=0)
            question = [{"role": "user", "content": ASKED}]
            tool = {"name": "look_up", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
            answer = await program.messages.create(model="m", max_tokens=9, messages=question, tools=[tool])
        conversation = ended([])
    assert [block.input for block in answer.content if block.type == "tool_use"] == [{}]
    (sequence,) = trained(conversation)
    assert sequence.token_ids[-len(script[0]) :].tolist() == list(script[0])

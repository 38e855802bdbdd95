"""Comparison of a renderer with a model's own chat template: both render a few conversations, token by token.

The template decides. Cases that no rollout reaches are skipped: thoughts if the template shows none, and two calls in
one answer if the template accepts only one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from renderers import RendererConfig, create_renderer

from primeslurm.chat import ChatMessage
from primeslurm.models.renderers import renderer_traits

SYSTEM = "Be brief."
THOUGHT = "It has to be looked up."
TOOLS: Sequence[dict[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
)
EMPTY_THOUGHTS = "<think>\n\n</think>\n\n"  # Start of an answer of a model that is told not to think
SOME_DAY = datetime(2024, 7, 26)  # Date for templates that show one. `renderers` uses the same for Llama.


def _call(number: int) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": {"word": "a b"}}
    return {"id": f"functions.look_up:{number}", "type": "function", "function": function}


def _result(number: int) -> ChatMessage:
    return {"role": "tool", "tool_call_id": _call(number)["id"], "name": "look_up", "content": f"found {number}"}


def _calling(*numbers: int, **fields: Any) -> ChatMessage:
    return {"role": "assistant", "content": "", "tool_calls": [_call(number) for number in numbers], **fields}


START: Sequence[ChatMessage] = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": "Look it up."})
ANSWER: Sequence[ChatMessage] = (
    {"role": "assistant", "content": "It is there."},
    {"role": "user", "content": "Thanks."},
)


@dataclass(frozen=True)
class Probe:
    """A conversation that renderer and template must render to the same tokens."""

    messages: Sequence[ChatMessage]
    tools: Sequence[dict[str, Any]] = TOOLS
    shown: str = ""  # Skip the comparison if the template does not show this text
    may_raise: bool = False  # Skip the comparison if the template refuses the conversation


CHATS = (Probe(START, ()), Probe([*START, *ANSWER], ()), Probe(START[1:], ()))
CALLS = (
    Probe([*START, _calling(0), _result(0), *ANSWER]),
    Probe([*START, _calling(0), _result(0)]),
    Probe(START[1:]),
    Probe([*START, _calling(0, 1, content="Both."), _result(0), _result(1), *ANSWER], may_raise=True),
    Probe([*START, _calling(0, reasoning_content=THOUGHT), _result(0)], shown=THOUGHT),
    Probe([*START, _calling(0, reasoning_content=THOUGHT), _result(0), *ANSWER], shown=THOUGHT),
)
# Tells whether a template keeps the thoughts of earlier answers
CLOSED = Probe([*START, {**ANSWER[0], "reasoning_content": THOUGHT}, ANSWER[1]], ())


def probes(shown: bool, described: bool = False) -> Sequence[Probe]:
    """Return the conversations to compare for a template that shows tools to the model, or not.

    If only the renderer describes the tools, calls are compared without any tool being offered.
    """
    if shown:
        return (*CHATS, *CALLS)
    return (*CHATS, *(replace(probe, tools=()) for probe in CALLS)) if described else CHATS


def difference(
    tokenizer: Any,
    config: RendererConfig,
    options: Mapping[str, Any] | None = None,
    compared: Sequence[Probe] = (*CHATS, *CALLS),
) -> str:
    """Return how a renderer differs from a chat template, called with `options`; "" if they agree or there is none."""
    try:
        renderer = create_renderer(tokenizer, config)
    except Exception as error:  # for example an assertion that names a missing special token
        return str(error) or type(error).__name__
    if not tokenizer.chat_template or renderer_traits((config.model_extra or {}).get("renderer", "")).replaces_template:
        return ""
    differences = (compare(tokenizer, renderer, probe, options or {}) for probe in compared)
    return next(filter(None, differences), "")


def shows_tools(tokenizer: Any, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a chat template shows the model the tools that it may call."""
    try:
        return "look_up" in tokenizer.decode(render_by_template(tokenizer, START, TOOLS, options or {}))
    except Exception:  # the comparison reports the error
        return True


def keeps_thoughts(tokenizer: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a chat template shows the thoughts of answers before the last question."""
    try:
        return THOUGHT in tokenizer.decode(render_by_template(tokenizer, CLOSED.messages, (), options))
    except Exception:
        return False


def default_system(tokenizer: Any, options: Mapping[str, Any]) -> str | None:
    """Return the system prompt that a chat template adds to conversations without one; None if it is unclear."""
    try:
        with_system, without = (
            tokenizer.decode(render_by_template(tokenizer, messages, (), options)) for messages in (START, START[1:])
        )
    except Exception:
        return None
    before, system, after = with_system.partition(SYSTEM)
    fits = system and without.startswith(before) and without.endswith(after) and len(without) >= len(before + after)
    return without[len(before) : len(without) - len(after)] if fits else None


def compare(tokenizer: Any, renderer: Any, probe: Probe, options: Mapping[str, Any]) -> str:
    """Return how a renderer and the chat template differ in one conversation; "" if they agree."""
    try:
        expected = render_by_template(tokenizer, probe.messages, probe.tools, options)
    except Exception as error:  # templates raise jinja2's errors, TypeError or their own
        return "" if probe.may_raise else f"the chat template says {error}"
    if probe.shown not in tokenizer.decode(expected):
        return ""
    # Renderers may change the messages.
    messages, tools = copy.deepcopy(list(probe.messages)), list(probe.tools) or None
    try:
        rendered = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    except Exception as error:  # for example, Llama's accepts one call per answer
        return f"it says {error}"
    if rendered == expected or _differ_in_empty_thoughts(tokenizer.decode(rendered), tokenizer.decode(expected)):
        return ""
    # Show the first difference, with a few tokens before it.
    pairs = zip(rendered, expected, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(rendered), len(expected)))
    ours, theirs = (tokenizer.decode(ids[max(index - 4, 0) :][:24]) for ids in (rendered, expected))
    return f"it renders {ours!r} where the model's chat template has {theirs!r}"


def _differ_in_empty_thoughts(rendered: str, expected: str) -> bool:
    # The renderer keeps the empty thoughts before old answers, because those answers were sampled after them.
    if rendered.endswith(EMPTY_THOUGHTS) != expected.endswith(EMPTY_THOUGHTS):
        return False
    return rendered.replace(EMPTY_THOUGHTS, "") == expected.replace(EMPTY_THOUGHTS, "")


def render_by_template(
    tokenizer: Any, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> list[int]:
    """Return the tokens of a prompt by the tokenizer's chat template. Raise whatever the template raises."""
    tools, extra = _template_tools(tokenizer, tools)

    def render(arguments_as_text: bool) -> list[int]:
        given = copy.deepcopy(list(messages))
        if arguments_as_text:
            for call in (call for message in given for call in message.get("tool_calls", [])):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        ids: list[int] = tokenizer.apply_chat_template(
            given,
            tools=tools or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **{"strftime_now": SOME_DAY.strftime, **extra, **options},
        )
        return ids

    try:
        return render(arguments_as_text=False)
    except TypeError:  # some templates concatenate the arguments of calls as text
        return render(arguments_as_text=True)


def _template_tools(tokenizer: Any, tools: Sequence[dict[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
    """Return the tools as the template expects them, and further arguments of the template."""
    if not tools or "tool_declare" not in tokenizer.chat_template:
        return list(tools), {}
    # Kimi's tokenizers are code in the model's directory, which is not run here. They pass the template tools with
    # sorted keys and, from K2.5 on, the tools in TypeScript.
    from renderers.kimi_k25 import _encode_tools_typescript

    ordered = json.loads(json.dumps(list(tools), sort_keys=True))
    return ordered, {"tools_ts_str": _encode_tools_typescript(ordered)}

"""How a renderer and a model's own chat template differ: both render a few conversations, and tokens are compared.

The model's template decides, except in cases that no rollout reaches: a template that shows no thoughts is not asked
about thoughts, and one that takes a single call per answer is not asked about two.
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
EMPTY_THOUGHTS = "<think>\n\n</think>\n\n"
"""A model that does not think is given these to begin its answer with."""
SOME_DAY = datetime(2024, 7, 26)
"""Templates that tell the date are shown this one, which `renderers` takes for Llama's."""


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
    """A conversation that a renderer and a template must render alike."""

    messages: Sequence[ChatMessage]
    tools: Sequence[dict[str, Any]] = TOOLS
    shown: str = ""
    """Not compared where the template does not show this."""
    may_raise: bool = False
    """Not compared where the template refuses it."""


CHATS = (Probe(START, ()), Probe([*START, *ANSWER], ()), Probe(START[1:], ()))
CALLS = (
    Probe([*START, _calling(0), _result(0), *ANSWER]),
    Probe([*START, _calling(0), _result(0)]),
    Probe(START[1:]),
    Probe([*START, _calling(0, 1, content="Both."), _result(0), _result(1), *ANSWER], may_raise=True),
    Probe([*START, _calling(0, reasoning_content=THOUGHT), _result(0)], shown=THOUGHT),
    Probe([*START, _calling(0, reasoning_content=THOUGHT), _result(0), *ANSWER], shown=THOUGHT),
)
CLOSED = Probe([*START, {**ANSWER[0], "reasoning_content": THOUGHT}, ANSWER[1]], ())
"""Here a template keeps thoughts of old answers, or drops them."""


def probes(shown: bool, described: bool = False) -> Sequence[Probe]:
    """List what a renderer and a template must render alike.

    Args:
        shown: the template shows tools to the model.
        described: the renderer shows them where the template does not. Calls are compared, then, without any tool.
    """
    if shown:
        return (*CHATS, *CALLS)
    return (*CHATS, *(replace(probe, tools=()) for probe in CALLS)) if described else CHATS


def unlike_template(
    tokenizer: Any,
    config: RendererConfig,
    options: Mapping[str, Any] | None = None,
    compared: Sequence[Probe] = (*CHATS, *CALLS),
) -> str:
    """Say how a renderer differs from a tokenizer's own chat template; empty if it does not, or if there is none.

    Args:
        tokenizer: of the model.
        config: of the renderer.
        options: arguments of the chat template.
        compared: conversations.
    """
    try:
        renderer = create_renderer(tokenizer, config)
    except Exception as error:  # an assertion that names a special token, for one
        return str(error) or type(error).__name__
    if not tokenizer.chat_template or renderer_traits((config.model_extra or {}).get("renderer", "")).harmony:
        return ""
    found = (_unlike(tokenizer, renderer, probe, options or {}) for probe in compared)
    return next(filter(None, found), "")


def shows_tools(tokenizer: Any, options: Mapping[str, Any] | None = None) -> bool:
    """Tell whether a model's chat template shows it the tools that it may call."""
    try:
        return "look_up" in tokenizer.decode(by_its_template(tokenizer, START, TOOLS, options or {}))
    except Exception:  # what it says is told with the comparison
        return True


def keeps_thoughts(tokenizer: Any, options: Mapping[str, Any]) -> bool:
    """Tell whether a model's chat template shows thoughts of answers before the last question."""
    try:
        return THOUGHT in tokenizer.decode(by_its_template(tokenizer, CLOSED.messages, (), options))
    except Exception:
        return False


def default_system(tokenizer: Any, options: Mapping[str, Any]) -> str | None:
    """Read what a chat template takes for the system prompt where there is none; None if that is unclear."""
    try:
        named, without = (
            tokenizer.decode(by_its_template(tokenizer, messages, (), options)) for messages in (START, START[1:])
        )
    except Exception:
        return None
    before, said, after = named.partition(SYSTEM)
    fits = said and without.startswith(before) and without.endswith(after) and len(without) >= len(before + after)
    return without[len(before) : len(without) - len(after)] if fits else None


def _unlike(tokenizer: Any, renderer: Any, probe: Probe, options: Mapping[str, Any]) -> str:
    try:
        theirs = by_its_template(tokenizer, probe.messages, probe.tools, options)
    except Exception as error:  # templates raise what they like: jinja2's errors, TypeError, their own
        return "" if probe.may_raise else f"the chat template says {error}"
    if probe.shown not in tokenizer.decode(theirs):
        return ""
    messages, tools = copy.deepcopy(list(probe.messages)), list(probe.tools) or None
    try:
        ours = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    except Exception as error:  # Llama's takes one call an answer
        return f"it says {error}"
    if ours == theirs or _alike_but_for_empty_thoughts(tokenizer.decode(ours), tokenizer.decode(theirs)):
        return ""
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    here, there = (tokenizer.decode(ids[max(at - 4, 0) :][:24]) for ids in (ours, theirs))
    return f"it renders {here!r} where the model's chat template has {there!r}"


def _alike_but_for_empty_thoughts(ours: str, theirs: str) -> bool:
    """Tell whether texts differ only in that ours has the empty thoughts that old answers were sampled after."""
    if ours.endswith(EMPTY_THOUGHTS) != theirs.endswith(EMPTY_THOUGHTS):
        return False
    return ours.replace(EMPTY_THOUGHTS, "") == theirs.replace(EMPTY_THOUGHTS, "")


def by_its_template(
    tokenizer: Any, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> list[int]:
    """Render a prompt by a tokenizer's chat template, with arguments of calls as it takes them. Raises what it does."""
    shown, own = _as_its_tokenizer_has_it(tokenizer, tools)

    def ids(arguments_as_text: bool) -> list[int]:
        said = copy.deepcopy(list(messages))
        for call in (call for message in said for call in message.get("tool_calls", [])) if arguments_as_text else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        found: list[int] = tokenizer.apply_chat_template(
            said,
            tools=shown or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **{"strftime_now": SOME_DAY.strftime, **own, **options},
        )
        return found

    try:
        return ids(arguments_as_text=False)
    except TypeError:  # some want the arguments of calls as text
        return ids(arguments_as_text=True)


def _as_its_tokenizer_has_it(tokenizer: Any, tools: Sequence[dict[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
    """What a template is given for tools, and with them.

    Kimi's tokenizers are programs beside the model, which are not run here. They give the template tools with their
    keys sorted, and from K2.5 on also in TypeScript.
    """
    if not tools or "tool_declare" not in tokenizer.chat_template:
        return list(tools), {}
    from renderers.kimi_k25 import _encode_tools_typescript

    ordered = json.loads(json.dumps(list(tools), sort_keys=True))
    return ordered, {"tools_ts_str": _encode_tools_typescript(ordered)}

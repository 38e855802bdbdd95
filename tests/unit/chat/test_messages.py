"""Normalization of messages to the form that a chat template expects."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from primeslurm.chat.messages import ConversationError, MessageForm, normalized, tools_of
from primeslurm.chat.template import ChatTemplate
from primeslurm.chat.training_text import TrainingText
from tests.support.chat_templates import BUNDLED
from tests.support.turn_templates import CHATML, GEMMA, LLAMA_3, MISTRAL, tokenizer

ASKED = {"role": "user", "content": "Weather?"}
OBJECT, TEXT = {"city": "Rome", "é": [1, 2.5, None]}, '{"city": "Rome", "é": [1, 2.5, null]}'
NAMES = sorted(path.stem for path in BUNDLED.glob("*.jinja"))
TEMPLATES = {name: (BUNDLED / f"{name}.jinja").read_text() for name in NAMES}
PRINTED = "{%- for m in messages %}{{ m.content }}{% for c in m.tool_calls %}CALL{% endfor %}{% endfor %}"


def calling(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [ASKED, {"role": "assistant", "content": None, "tool_calls": [call], **fields}]


def only(message: Any) -> Any:
    """Return the normalized last message of a conversation."""
    return normalized([ASKED, message])[-1]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_as_text_or_object_render_alike_and_null_content_is_not_printed(name: str) -> None:
    template = ChatTemplate(tokenizer(TEMPLATES[name], "<|im_end|>"))
    texts = {template.render(normalized(calling(given), template.form)) for given in (OBJECT, TEXT)}
    assert len(texts) == 1
    (text,) = texts
    assert "Rome" in text and "None" not in text and "'city'" not in text and '\\"' not in text
    empty = template.render(normalized(calling(OBJECT, content=""), template.form))
    absent = calling(OBJECT)
    del absent[1]["content"]
    assert text == empty == template.render(normalized(absent, template.form))


def test_form_of_arguments_follows_the_template() -> None:
    forms = {
        name: ChatTemplate(tokenizer(template, "<|im_end|>")).form.arguments for name, template in TEMPLATES.items()
    }
    assert forms == {**dict.fromkeys(NAMES, "object"), "DeepSeek-R1": "text"}
    assert ChatTemplate(tokenizer(LLAMA_3)).form.arguments == "object", "JSON within JSON if they are text"
    printing = PRINTED.replace("CALL", "{{ c.function.arguments }}")
    assert ChatTemplate(tokenizer(printing)).form.arguments == "text", "an object would be printed as Python has it"
    assert ChatTemplate(tokenizer(CHATML)).form.arguments == "not shown"


def test_argument_text_is_not_reformatted() -> None:
    form = MessageForm(arguments="text")
    calls = [normalized(calling(given), form)[1]["tool_calls"][0] for given in ('{"a":1}', {"a": "é"}, None)]
    assert [call["function"]["arguments"] for call in calls] == ['{"a":1}', '{"a": "é"}', "{}"]


def test_missing_content_is_null_only_if_the_template_then_renders_less() -> None:
    header = "{% if m.content is not none %}>>>all\n{{ m.content }}{% endif %}"
    shows = PRINTED.replace("{{ m.content }}", header).replace("CALL", "{{ c.function.arguments | tojson }}")
    assert ChatTemplate(tokenizer(shows)).form.no_content is None
    plain = PRINTED.replace("CALL", "{{ c.function.arguments | tojson }}")
    assert ChatTemplate(tokenizer(plain)).form.no_content == ""


def test_null_fields_are_removed() -> None:
    nulls = dict.fromkeys(("tool_calls", "function_call", "name", "refusal", "audio", "reasoning_content"))
    assert only({"role": "assistant", "content": "Hi.", **nulls}) == {"role": "assistant", "content": "Hi."}
    assert only({"role": "assistant", "content": "Hi.", "tool_calls": []}) == {"role": "assistant", "content": "Hi."}
    assert only({"role": "tool", "tool_call_id": "1", "content": None})["content"] == ""


def test_text_parts_are_joined_and_images_stay() -> None:
    texts = [{"type": "text", "text": "a"}, "b", {"type": "output_text", "text": "c"}]
    assert only({"role": "user", "content": texts})["content"] == "abc"
    image = {"type": "image"}
    content = only({"role": "user", "content": ["a", image]})["content"]
    assert content == [{"type": "text", "text": "a"}, image]


def test_bare_function_calls_are_wrapped() -> None:
    message = only({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]})
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("nothing", [{}, None, "", " ", "{}", "null"])
def test_missing_arguments_become_an_empty_object(nothing: Any) -> None:
    message = only({"role": "assistant", "tool_calls": [{"name": "f", "arguments": nothing}]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_developer_becomes_system_unless_the_template_supports_it() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, ASKED]
    assert normalized(messages)[0]["role"] == "system"
    knows = ChatTemplate(tokenizer(CHATML + "{% if messages[0].role == 'developer' %}{% endif %}"))
    assert normalized(messages, knows.form)[0]["role"] == "developer"


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_get_the_key_that_the_template_reads(given: str) -> None:
    messages = [ASKED, {"role": "assistant", "content": "Hi.", given: "Hm."}]
    for read in ("reasoning_content", "thinking"):
        template = ChatTemplate(tokenizer("{% for m in messages %}{{ m." + read + " }}{{ m.content }}{% endfor %}"))
        assert template.render(normalized(messages, template.form)).endswith("Hm.Hi.")
        assert template.shows_thoughts
    assert not ChatTemplate(tokenizer(CHATML)).shows_thoughts


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("hello", "not a list of objects"),
        ({"content": "x"}, "it has no role"),
        ({"from": "human", "value": "x"}, "it has no role"),
        ({"role": "gpt", "content": "x"}, r"unknown role 'gpt' \(`role: assistant`\)"),
        ({"role": "critic", "content": "x"}, "unknown role 'critic'"),
        ({"role": "user"}, "its role is user, but it has no content"),
        ({"role": "assistant", "content": None}, "its role is assistant, but it has no content"),
        ({"role": "user", "content": {"text": "x"}}, "content is an object"),
        ({"role": "user", "content": [{"type": "video", "video": "a"}]}, "content of type 'video'"),
        ({"role": "user", "content": [{"type": "text"}]}, "content of type 'text'"),
        ({"role": "user", "content": [7]}, "content of type 'a number'"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, "tool_calls is not a list"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "no function with a name"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "are not JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "are not an object"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": 7}]}, "are not an object"),
        *[({"role": "assistant", "tool_calls": [{"name": "f", "arguments": wrong}]}, "are not an object")
            for wrong in (0, False, [], "0", "false", "[]", '""')],
        *[({"role": "assistant", "tool_calls": [{"name": "f", name: OBJECT}]}, f"has {name}, but no arguments")
            for name in ("parameters", "input", "args")],
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None, "parameters": TEXT}}]},
            "has parameters, but no arguments"),
        ({"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}, "a message of role user calls tools"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "has removed"),
        ({"role": "assistant", "content": "x", "reasoning_content": ["a"]}, "thoughts are not text"),
        ({"role": "assistant", "content": "x", "weight": 0}, "weights of messages are not supported"),
    ],
)  # fmt: skip
def test_errors_name_the_message_and_the_problem(message: Any, why: str) -> None:
    with pytest.raises(ConversationError, match=f"^message 2: .*{why}"):
        normalized([ASKED, message])


@pytest.mark.parametrize("arguments", ["{", "[1]", ""])
def test_lenient_keeps_any_sampled_answer(arguments: str) -> None:
    sampled = calling(arguments)
    before = copy.deepcopy(sampled)
    result = normalized(sampled, lenient=True)[1]
    assert sampled == before
    assert result["content"] == "" and result["tool_calls"][0]["function"]["arguments"] == (arguments or {})


def test_tools_are_wrapped_and_parsed_from_text() -> None:
    function = {"name": "f", "parameters": {}}
    wrapped = [{"type": "function", "function": function}]
    assert tools_of([function]) == tools_of(wrapped) == tools_of('[{"name": "f", "parameters": {}}]') == wrapped
    assert tools_of(None) is tools_of([]) is tools_of("") is None
    for wrong in ("{", [1], [{"function": {}}], {"name": "f"}):
        with pytest.raises(ConversationError):
            tools_of(wrong)


def refused(template: str, *messages: dict[str, Any], tools: Any = None) -> str:
    text = TrainingText(tokenizer(template, "<|im_end|>"), every=True)
    with pytest.raises(ConversationError) as caught:
        text.parts({"messages": list(messages), "tools": tools})
    return str(caught.value)


ANSWERED = {"role": "assistant", "content": "Sunny."}
SYSTEM = {"role": "system", "content": "Be brief."}


def test_messages_that_the_template_refuses_or_skips_are_errors() -> None:
    late = refused(TEMPLATES["Qwen3.5-0.8B"], ASKED, SYSTEM, ANSWERED)
    assert late.startswith("the chat template fails: TemplateError: System message must be at the beginning.")
    assert "TemplateError: Conversation roles must alternate" in refused(GEMMA, ASKED, ASKED, ANSWERED)
    assert "Tool call IDs should be" in refused(MISTRAL, *calling({})[:1], {**calling({})[1], "tool_calls": [
        {"id": "1", "function": {"name": "f"}}]})  # fmt: skip
    silent = CHATML.replace("for message in messages", "for message in messages if message.role != 'tool'")
    result = {"role": "tool", "content": "sunny"}
    assert refused(silent, ASKED, result, ANSWERED) == (
        "message 2: the chat template leaves out this message of role tool (write it into another message)"
    )
    assert "does not show tool calls" in refused(CHATML, *calling({}))
    assert "does not show the model its `tools`" in refused(CHATML, ASKED, ANSWERED, tools=[{"name": "f"}])
    words = {**calling({})[1], "content": "I look it up."}
    assert "message 2: the chat template leaves out this message" in refused(LLAMA_3, ASKED, words)


def test_content_shown_in_json_or_trimmed_is_not_an_error() -> None:
    text = TrainingText(tokenizer(LLAMA_3, "<|eot_id|>"))
    result = {"role": "tool", "tool_call_id": "call00001", "content": 'It is "sunny"\nin é.'}
    parts = text.parts({"messages": [{**ASKED, "content": "  Weather?\n"}, calling({})[1], result, ANSWERED]})
    assert parts[-1] == ("Sunny.<|eot_id|>", True)


def test_missing_chat_template_is_an_error(tmp_path: Path) -> None:
    assert refused("", ASKED, ANSWERED).startswith("the model has no chat template (add one")

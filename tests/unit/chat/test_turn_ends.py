"""The token that ends a turn is trained with the answer, however the chat template ends turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from renderers.base import load_tokenizer

from primeslurm.chat.messages import ConversationError, normalized
from primeslurm.chat.training_text import TrainingText
from primeslurm.chat.turn_ends import TurnEnd
from tests.support.chat_templates import BUNDLED
from tests.support.turn_templates import (
    CHATML,
    GEMMA,
    HARMONY,
    LLAMA_3,
    MISTRAL,
    NEXT_ROLE,
    PHI_3,
    UNENDING,
    write_model,
)

Message = dict[str, Any]
GLM_STOPS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
LLAMA_STOPS = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
DEEPSEEK_END = "<\uff5cend▁of▁sentence\uff5c>"
ASKED: Message = {"role": "user", "content": "Weather in Rome?"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLED: Message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "sunny"}
SUNNY: Message = {"role": "assistant", "content": "Sunny.", "tool_calls": None}
MORE: Message = {"role": "user", "content": "And in Oslo?"}
RAIN: Message = {"role": "assistant", "content": "Rain."}
TOOL_TALK = [ASKED, CALLED, RESULT, SUNNY]
TALK = [ASKED, SUNNY, MORE, RAIN]


def bundled(name: str) -> str:
    return (BUNDLED / f"{name}.jinja").read_text()


def training_text(
    path: Path, template: str, eos: str | None, stops: list[str] | str | None = None, *, every: bool = False
) -> TrainingText:
    return TrainingText(load_tokenizer(str(write_model(path, template, eos, stops))), every)


def trained(text: TrainingText, messages: list[Message]) -> list[str]:
    """Return the trained parts. All parts together have to be the rendered conversation."""
    parts = text.parts({"messages": messages})
    whole = text.template.render(normalized(messages, text.template.form))
    joined = "".join(part for part, _ in parts)
    assert parts[-1][1] and (whole.startswith(joined) or joined.startswith(whole))
    return [part for part, is_trained in parts if is_trained]


@pytest.mark.parametrize(
    ("name", "template", "eos", "stops", "expected"),
    [
        ("chatml", CHATML, "<|im_end|>", "<|im_end|>", ["Sunny.<|im_end|>", "Rain.<|im_end|>"]),
        ("chatml of a base model", CHATML, "<|endoftext|>", None, ["Sunny.<|im_end|>", "Rain.<|im_end|>"]),
        ("llama", LLAMA_3, "<|eot_id|>", LLAMA_STOPS, ["Sunny.<|eot_id|>", "Rain.<|eot_id|>"]),
        ("llama, unlisted", LLAMA_3, "<|end_of_text|>", None, ["Sunny.<|eot_id|>", "Rain.<|eot_id|>"]),
        ("mistral", MISTRAL, "</s>", "</s>", [" Sunny.</s>", " Rain.</s>"]),
        ("gemma", GEMMA, "<eos>", ["<eos>", "<end_of_turn>"], ["Sunny.<end_of_turn>", "Rain.<end_of_turn>"]),
        ("gemma, unlisted", GEMMA, "<eos>", None, ["Sunny.<end_of_turn>", "Rain.<end_of_turn>"]),
        ("phi", PHI_3, "<|endoftext|>", ["<|endoftext|>", "<|end|>"], ["Sunny.<|end|>", "Rain.<|end|>"]),
        ("next role", NEXT_ROLE, "<|end|>", ["<|end|>", "<|user|>"], ["Sunny.\n<|user|>", "Rain.\n<|user|>"]),
        ("next role, unlisted", NEXT_ROLE, "<|end|>", None, ["Sunny.\n<|user|>", "Rain.\n<|user|>"]),
        ("GLM-4.6", bundled("GLM-4.6"), "<|endoftext|>", GLM_STOPS,
            ["\n<think></think>\nSunny.<|user|>", "\n<think></think>\nRain.<|user|>"]),
        ("GLM-4.7", bundled("GLM-4.7-Flash"), "<|endoftext|>", GLM_STOPS, ["Sunny.<|user|>", "Rain.<|user|>"]),
        ("GLM-4.7, unlisted", bundled("GLM-4.7-Flash"), "<|endoftext|>", None, ["Sunny.<|user|>", "Rain.<|user|>"]),
        ("two tokens, the first stops", CHATML.replace("<|im_end|>", "<|im_end|><|eot|>"), "<|im_end|>", "<|im_end|>",
            ["Sunny.<|im_end|>", "Rain.<|im_end|>"]),
        ("two tokens, the second stops", CHATML.replace("<|im_end|>", "<|im_end|><|eot|>"), "<|eot|>", "<|eot|>",
            ["Sunny.<|im_end|><|eot|>", "Rain.<|im_end|><|eot|>"]),
        ("two tokens, unlisted", CHATML.replace("<|im_end|>", "<|im_end|><|eot|>"), "<|endoftext|>", None,
            ["Sunny.<|im_end|>", "Rain.<|im_end|>"]),
        ("text behind the token", CHATML.replace("<|im_end|>", "<|im_end|> END"), "<|im_end|>", "<|im_end|>",
            ["Sunny.<|im_end|>", "Rain.<|im_end|>"]),
        ("Qwen3-2507", bundled("Qwen3-30B-A3B-Instruct-2507"), "<|im_end|>", ["<|im_end|>", "<|endoftext|>"],
            ["Sunny.<|im_end|>", "Rain.<|im_end|>"]),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)  # fmt: skip
def test_each_answer_is_trained_with_its_end_token(
    name: str, template: str, eos: str, stops: Any, expected: list[str], tmp_path: Path
) -> None:
    text = training_text(tmp_path, template, eos, stops, every=True)
    assert trained(text, TALK) == expected
    text.every = False
    assert trained(text, TALK) == expected[1:]
    assert trained(text, TALK[:2]) == expected[:1]


@pytest.mark.parametrize(
    ("name", "eos", "stops", "expected"),
    [
        ("GLM-4.6", "<|endoftext|>", GLM_STOPS, [
            "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
            "</tool_call><|observation|>", "\n<think></think>\nSunny.<|user|>"]),
        ("GLM-4.6", "<|endoftext|>", None, [
            "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
            "</tool_call><|observation|>", "\n<think></think>\nSunny.<|user|>"]),
        ("GLM-4.7-Flash", "<|endoftext|>", GLM_STOPS, [
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call><|observation|>",
            "Sunny.<|user|>"]),
        ("Qwen3-30B-A3B-Instruct-2507", "<|im_end|>", ["<|im_end|>", "<|endoftext|>"], [
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
            "Sunny.<|im_end|>"]),
        ("Qwen3.5-0.8B", "<|im_end|>", ["<|im_end|>"], [
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
            "<|im_end|>", "Sunny.<|im_end|>"]),
    ],
)  # fmt: skip
def test_calls_and_answers_end_with_the_models_own_tokens(
    name: str, eos: str, stops: list[str] | None, expected: list[str], tmp_path: Path
) -> None:
    text = training_text(tmp_path, bundled(name), eos, stops, every=True)
    assert trained(text, TOOL_TALK) == expected
    assert trained(text, TOOL_TALK[:2]) == expected[:1]
    text.every = False
    assert trained(text, TOOL_TALK) == expected[1:]


@pytest.mark.parametrize("stops", [["<|return|>", "<|endoftext|>", "<|call|>"], None])
def test_gpt_oss_ends_answers_and_calls_with_different_tokens(stops: list[str] | None, tmp_path: Path) -> None:
    text = training_text(tmp_path, HARMONY, "<|return|>", stops)
    assert trained(text, TOOL_TALK) == ["<|channel|>final<|message|>Sunny.<|return|>"]
    (called,) = trained(text, TOOL_TALK[:2])
    assert called == ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
    text.every = True
    with pytest.raises(ConversationError, match="message 2: the chat template renders this answer differently"):
        text.parts({"messages": TALK})


def test_llama_ends_code_with_another_token(tmp_path: Path) -> None:
    text = training_text(tmp_path, LLAMA_3, "<|eot_id|>", LLAMA_STOPS, every=True)
    code = {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": {"code": "1"}}}]}
    assert trained(text, [ASKED, code, RESULT, SUNNY]) == ["<|python_tag|>1<|eom_id|>", "Sunny.<|eot_id|>"]
    assert trained(text, TOOL_TALK)[0] == '{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>'


def test_deepseek_r1_trains_only_answers_that_its_template_shows_as_sampled(tmp_path: Path) -> None:
    text = training_text(tmp_path, bundled("DeepSeek-R1"), DEEPSEEK_END, DEEPSEEK_END)
    assert trained(text, TOOL_TALK) == [f"Sunny.{DEEPSEEK_END}"]
    with pytest.raises(ConversationError, match=r"message 2: .*prompt as the start.*write such lines as `prompt`"):
        text.parts({"messages": TALK[:2]})
    assert text.parts({"prompt": "a", "completion": "b"}) == [("a", False), (f"b{DEEPSEEK_END}", True)]


def test_thoughts_follow_the_prompt_for_thinking_or_not_thinking(tmp_path: Path) -> None:
    thinking = {**SUNNY, "reasoning_content": "Hm."}
    glm = training_text(tmp_path / "glm", bundled("GLM-4.7-Flash"), "<|endoftext|>", GLM_STOPS)
    assert trained(glm, [ASKED, thinking]) == ["Hm.</think>Sunny.<|user|>"]
    assert trained(glm, [ASKED, SUNNY]) == ["Sunny.<|user|>"]
    qwen = training_text(tmp_path / "qwen", bundled("Qwen3.5-0.8B"), "<|im_end|>", "<|im_end|>")
    assert trained(qwen, [ASKED, thinking]) == ["Hm.\n</think>\n\nSunny.<|im_end|>"]
    assert trained(qwen, [ASKED, SUNNY]) == ["Sunny.<|im_end|>"]


def test_train_all_is_an_error_if_the_template_drops_earlier_thoughts(tmp_path: Path) -> None:
    text = training_text(tmp_path, bundled("Qwen3-0.6B"), "<|im_end|>", "<|im_end|>", every=True)
    with pytest.raises(ConversationError, match=r"message 2: .* once messages follow it: .*`train: last`"):
        text.parts({"messages": TOOL_TALK})
    text.every = False
    assert trained(text, TOOL_TALK) == ["<think>\n\n</think>\n\nSunny.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "eos", "stops", "completion", "expected"),
    [
        (CHATML, "<|im_end|>", "<|im_end|>", "b", "b<|im_end|>"),
        (CHATML, "<|im_end|>", "<|im_end|>", "b<|im_end|>\n", "b<|im_end|>"),
        (CHATML, "<|endoftext|>", None, "b", "b<|im_end|>"),
        (GEMMA, "<eos>", None, "b", "b<end_of_turn>"),
        (NEXT_ROLE, "<|end|>", ["<|end|>", "<|user|>"], "b", "b\n<|user|>"),
        (NEXT_ROLE, "<|end|>", ["<|end|>", "<|user|>"], "b<|end|>", "b<|end|>"),
        (bundled("GLM-4.6"), "<|endoftext|>", GLM_STOPS, "b", "b<|user|>"),
        (bundled("GLM-4.6"), "<|endoftext|>", GLM_STOPS, "<tool_call>b\n</tool_call>",
            "<tool_call>b\n</tool_call><|observation|>"),
        ("", "<|end|>", None, "b", "b<|end|>"),
        (UNENDING, "<|end|>", None, "b", "b<|end|>"),
    ],
)  # fmt: skip
def test_completion_is_trained_with_exactly_one_end_token(
    template: str, eos: str, stops: Any, completion: str, expected: str, tmp_path: Path
) -> None:
    text = training_text(tmp_path, template, eos, stops)
    parts = text.parts({"prompt": "a", "completion": completion})
    assert parts[0] == ("a", False) and [part for part, is_trained in parts if is_trained] == [expected]


@pytest.mark.parametrize("listed", ["int", "list"])
def test_generation_config_lists_one_stop_token_or_several(listed: str, tmp_path: Path) -> None:
    stops = "<|user|>" if listed == "int" else ["<|user|>"]
    ends = training_text(tmp_path, NEXT_ROLE, "<|end|>", stops).ends
    assert ends.stops == {"<|user|>", "<|end|>"}
    assert ends.answer == TurnEnd("<|user|>", written=False, before="\n") and ends.unlisted() == []


def test_unlisted_end_tokens_are_reported(tmp_path: Path) -> None:
    assert training_text(tmp_path / "a", GEMMA, "<eos>").ends.unlisted() == ["<end_of_turn>"]
    glm = training_text(tmp_path / "b", bundled("GLM-4.6"), "<|endoftext|>").ends
    assert glm.unlisted() == ["<|observation|>", "<|user|>"]


@pytest.mark.parametrize("eos", ["<|end|>", None])
def test_template_without_end_tokens_is_an_error(eos: str | None, tmp_path: Path) -> None:
    text = training_text(tmp_path, UNENDING, eos)
    assert text.ends.answer is None
    with pytest.raises(ConversationError, match=r"writes '\\n\\n' after an answer, so there is .*\(have the template"):
        text.parts({"messages": TALK})


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_answer_followed_by_a_role_that_ends_no_turn_is_an_error(role: str, tmp_path: Path) -> None:
    text = training_text(tmp_path, bundled("GLM-4.6"), "<|endoftext|>", GLM_STOPS, every=True)
    with pytest.raises(ConversationError, match=f"message 2: a message of role {role} follows"):
        text.parts({"messages": [ASKED, SUNNY, {"role": role, "content": "Go on."}, MORE, RAIN]})


def test_end_token_inside_an_answer_does_not_cut_it(tmp_path: Path) -> None:
    # <|endoftext|> is one of GLM's stop tokens, and the text of an answer may contain it.
    text = training_text(tmp_path, bundled("GLM-4.6"), "<|endoftext|>", GLM_STOPS)
    content = "It is <|endoftext|> there."
    (answer,) = trained(text, [ASKED, {"role": "assistant", "content": content}])
    assert answer == f"\n<think></think>\n{content}<|user|>"


def test_end_of_an_answer_with_much_whitespace_is_found_in_linear_time(tmp_path: Path) -> None:
    # A regular expression that may start at each space would take 10^11 steps here.
    text = training_text(tmp_path, CHATML, "<|im_end|>", "<|im_end|>")
    content = "a" + " \n" * 200_000 + "b"
    assert trained(text, [ASKED, {"role": "assistant", "content": content}]) == [f"{content}<|im_end|>"]
    assert text.ends.within(f"{content}<|im_end|>{content}") is None
    assert text.ends.within(f"{content}<|im_end|>" + " " * 200_000) == len(content) + len("<|im_end|>")


@pytest.mark.parametrize(("messages", "every"), [([SUNNY], False), ([SUNNY], True), ([SUNNY, MORE, RAIN], True)])
def test_answer_without_a_prompt_is_an_error(messages: list[Message], every: bool, tmp_path: Path) -> None:
    text = training_text(tmp_path, CHATML, "<|im_end|>", "<|im_end|>", every=every)
    with pytest.raises(ConversationError, match="message 1: no message comes before this answer"):
        text.parts({"messages": messages})
    text.every = False
    assert trained(text, [SUNNY, MORE, RAIN]) == ["Rain.<|im_end|>"]

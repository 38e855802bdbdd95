"""Rollouts stop at the token that ends a turn in the chat template, and the next prompt has it once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from renderers import create_renderer
from renderers.base import load_tokenizer

from primeslurm.chat.template import ChatTemplate
from primeslurm.chat.turn_ends import TurnEnds
from primeslurm.orchestrator.rendering.renderer_selection import select_renderer
from tests.support import chat_templates
from tests.support.own_templates import OWN
from tests.support.turn_templates import CHATML, GEMMA, LLAMA_3, NEXT_ROLE, write_model

TEMPLATES = OWN | {path.stem: path.read_text() for path in sorted(chat_templates.BUNDLED.glob("*.jinja"))}
ASKED = [{"role": "user", "content": "Hi."}]


def by_its_template(directory: Path, *model: Any) -> Any:
    """Return the renderer of a model without a family."""
    write_model(directory, *model)
    (directory / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    return create_renderer(load_tokenizer(str(directory)), select_renderer(str(directory)).config)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_renderers_of_families_stop_at_the_ends_of_their_templates(name: str, tmp_path: Path) -> None:
    model = str(chat_templates.write_model(tmp_path, name, TEMPLATES[name]))
    tokenizer = load_tokenizer(model)
    chosen = select_renderer(model)
    assert (chosen.config.model_extra or {}).get("renderer") != "default"
    ends = TurnEnds(ChatTemplate(tokenizer))
    stops = create_renderer(tokenizer, chosen.config).get_stop_token_ids()
    assert ends.answer and ends.call
    assert {*tokenizer.convert_tokens_to_ids([ends.answer.token, ends.call.token])} <= set(stops)


@pytest.mark.parametrize(
    ("template", "eos", "listed", "stops"),
    [
        (CHATML, "<|endoftext|>", None, {"<|endoftext|>", "<|im_end|>"}),
        (GEMMA, "<eos>", None, {"<eos>", "<end_of_turn>"}),
        (LLAMA_3, "<|eot_id|>", ["<|eom_id|>", "<|eot_id|>"], {"<|eom_id|>", "<|eot_id|>"}),
        (NEXT_ROLE, "<|end|>", None, {"<|end|>", "<|user|>"}),
        (TEMPLATES["GLM-4.6"], "<|endoftext|>", None, {"<|endoftext|>", "<|user|>", "<|observation|>"}),
    ],
)
def test_template_renderer_stops_at_the_ends_of_the_template(
    template: str, eos: str, listed: Any, stops: set[str], tmp_path: Path
) -> None:
    renderer = by_its_template(tmp_path, template, eos, listed)
    assert set(renderer._tokenizer.convert_ids_to_tokens(renderer.get_stop_token_ids())) == stops


@pytest.mark.parametrize("template", [CHATML, GEMMA, NEXT_ROLE])
def test_next_prompt_starts_with_the_sampled_tokens(template: str, tmp_path: Path) -> None:
    renderer = by_its_template(tmp_path, template, "<|end|>")
    end = TurnEnds(ChatTemplate(renderer._tokenizer)).answer
    assert end is not None
    prompt = renderer.render_ids(ASKED, add_generation_prompt=True)
    sampled = renderer._tokenizer.encode(f"Hello.{end.before}{end.token}", add_special_tokens=False)
    answer = renderer.parse_response(sampled, prompt_ids=prompt).content
    assert answer.strip() == "Hello."
    said = [*ASKED, {"role": "assistant", "content": answer.removesuffix(end.before)}, *ASKED]
    later = renderer.render_ids(said, add_generation_prompt=True)
    assert later[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert later.count(sampled[-1]) == prompt.count(sampled[-1]) + (2 if end.written else 1), "its own and the user's"


def test_template_renderer_normalizes_arguments_and_nulls(tmp_path: Path) -> None:
    # DeepSeek-R1's template concatenates arguments as text. GLM's expects an object, and prints a null.
    function = {"name": "f", "arguments": '{"a": "é"}'}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    for name in ("DeepSeek-R1", "GLM-4.6", "Qwen3.5-0.8B"):
        renderer = by_its_template(tmp_path / name, TEMPLATES[name], "<|end|>", "<|end|>")
        text = renderer._tokenizer.decode(renderer.render_ids([*ASKED, call]))
        assert "é" in text and "None" not in text


@pytest.mark.parametrize("name", ["GLM-4.6", "Qwen3-0.6B", "Kimi-K2-Instruct"])
def test_renderers_accept_arguments_as_text_and_object(name: str, tmp_path: Path) -> None:
    model = str(chat_templates.write_model(tmp_path, name, TEMPLATES[name]))
    renderer = create_renderer(load_tokenizer(model), select_renderer(model).config)

    def rendered(arguments: Any, **fields: Any) -> list[int]:
        call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "tool_calls": [call], **fields}
        ids: list[int] = renderer.render_ids([*ASKED, answer])
        return ids

    wanted = rendered({"a": "é"}, content="")
    assert rendered('{"a": "\\u00e9"}', content=None) == rendered('{"a":"é"}') == wanted
    assert "é" in renderer._tokenizer.decode(wanted)

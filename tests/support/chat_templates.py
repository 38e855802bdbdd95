"""Compares our rendering of conversations of 20 turns with the chat templates that models were released with.

`python -m tests.support.chat_templates DIRECTORY --write` tries each `MODEL.jinja` of a directory, and writes
`benchmarks/results/chat_templates.json`, which docs/measurements/orchestration.md shows. The tokenizers are byte-level,
with the special tokens of renderer and template, and without the merges of the real vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from renderers import create_renderer
from renderers.base import load_tokenizer

from primeslurm.models.renderers import DEFAULT, renderers_of
from primeslurm.orchestrator.rendering import renderer_selection, template_comparison
from tests.support.conversations import TOOL, Message, missing_tokens, sampled, with_tokens

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "chat_templates.json"
BUNDLED = ROOT / "tests" / "data" / "chat_templates"
TURNS, QUESTION = 20, 9
"""Number of turns, and the turn after which the user asks another question."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
    },
}
MARK = re.compile(
    r"<\|[^|<>\s{}]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|\[gMASK\]|<sop>|\]~!?[a-z]\[|\[e~\["
    r"|</?(?:think|tool_call|tool_calls|tool_response|arg_key|arg_value|minimax:tool_call|assistant|user|system|tools)>"
)
"""Text that is a single token in the vocabularies of these models."""
BEGINNING = {"deepseek": "<\uff5cbegin▁of▁sentence\uff5c>", "llama": "<|begin_of_text|>", "laguna": "〈|EOS|〉"}
"""`bos_token` by the beginning of a model's type."""
TYPES = {
    r"qwen3\.": "qwen3_5_moe",
    r"qwen3-vl": "qwen3_vl_moe",
    r"qwen3": "qwen3_moe",
    r"glm-5": "glm_moe_dsa",
    r"glm": "glm4_moe",
    r"intellect-3": "glm4_moe",
    r"kimi-k2\.": "kimi_k25",
    r"kimi": "kimi_k2",
    r"minimax": "minimax_m2",
    r"nemotron": "nemotron_h",
    r"deepseek-v3\.2": "deepseek_v32",
    r"deepseek-v4": "deepseek_v4",
    r"deepseek-r1-distill": "llama",
    r"deepseek": "deepseek_v3",
    r"laguna": "laguna",
    r"llama": "llama",
}
"""`model_type` by a pattern in a model's name. The first match counts."""


@dataclass(frozen=True)
class Kind:
    """Content of a conversation."""

    system: bool = True
    tools: bool = True
    parallel: bool = True
    thoughts: bool = True


KINDS = (Kind(), Kind(system=False), Kind(parallel=False), Kind(thoughts=False), Kind(tools=False))


@dataclass(frozen=True)
class Row:
    """Result for a model's template."""

    model: str
    renderer: str
    options: dict[str, Any]
    tools: bool
    thoughts: str
    """Whether thoughts before the last question are kept, dropped, or never shown."""
    same: int = 0
    """Fully rendered prompts that equal the template's, over all conversations."""
    prompts: int = 0
    extended: int = 0
    """Prompts of a conversation that extend the sampled tokens."""
    extended_same: int = 0
    """Those of them that equal the template's."""
    first: str = ""
    """The first difference (ours and the template's), or why there is no renderer."""


def conversation(kind: Kind) -> tuple[list[Message], list[int]]:
    """Return the messages, and their number in the prompt of each turn."""
    messages: list[Message] = [{"role": "system", "content": "Be brief."}] if kind.system else []
    messages.append({"role": "user", "content": "Look it up."})
    prompts, calls = [], 0
    for turn in range(TURNS):
        prompts.append(len(messages))
        answer: Message = {"role": "assistant", "content": ""}
        if kind.thoughts:
            answer["reasoning_content"] = f"I think {turn}."
        if not kind.tools or turn in (QUESTION, TURNS - 1):
            messages += [{**answer, "content": f"It is {turn}."}, {"role": "user", "content": "And then?"}]
            continue
        wanted = [("look_up", {"word": f"w {turn} é"})]
        wanted += [("add", {"a": turn, "b": [1.5, 2]})] if kind.parallel and turn % 4 == 2 else []
        answer["tool_calls"] = [
            {
                "id": f"functions.{name}:{calls + i}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(wanted)
        ]
        calls += len(wanted)
        messages.append({**answer, "content": f"I look {turn}." if turn % 3 == 1 else ""})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": f"found {turn}"}
            for call in answer["tool_calls"]
        ]
    return messages, prompts


def write_model(directory: Path, name: str, template: str) -> Path:
    """Write a model directory with this chat template and a byte-level tokenizer."""
    model = directory / name
    model.mkdir()
    model_type = next(kind for pattern, kind in TYPES.items() if re.match(pattern, name.lower()))
    tokens = list(dict.fromkeys(MARK.findall(template)))
    begins = next((token for start, token in BEGINNING.items() if name.lower().startswith(start)), None)
    tokens += [begins] if begins and begins not in tokens else []
    for renderer in renderers_of(model_type, name):
        special = tokens
        while missing := [
            t
            for t in missing_tokens(with_tokens(special), renderer_selection.renderer_config(renderer, {}))
            if t not in special
        ]:
            special = [*special, *missing]
        tokens = special
    tokenizer = with_tokens(tokens)
    if begins:
        tokenizer.add_special_tokens({"bos_token": begins})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": model_type}))
    return model


def tried(name: str, template: str) -> Row:
    """Render all conversations."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory), name, template)
        chosen = renderer_selection.select_renderer(str(model))
        tokenizer = load_tokenizer(str(model))
        extra = chosen.config.model_extra or {}
        used = extra.get("renderer") or (chosen.config.name if chosen.config.name == DEFAULT else "own")
        options = dict(extra.get("options", {})) | ({"system": extra["system"]} if "system" in extra else {})
        row = Row(name, used, options, not chosen.no_tools, _thoughts(tokenizer, options))
        if used == DEFAULT:
            why = chosen.no_tools.removeprefix(f"tools cannot be rendered for {model}: ")
            return Row(**{**asdict(row), "first": why.removesuffix("; name one that fits in model.renderer")})
        renderer = create_renderer(tokenizer, chosen.config)
        pairs = [
            pair for kind in KINDS if row.tools or not kind.tools for pair in _whole(renderer, tokenizer, kind, options)
        ]
        thinks = row.thoughts != "not shown" and getattr(renderer.config, "enable_thinking", True)
        kind = Kind(tools=row.tools, parallel=used != "llama-3", thoughts=thinks)
        extended = [a == b for a, b in _extended(renderer, tokenizer, kind, options)]
    differing = next((pair for pair in pairs if pair[0] != pair[1]), None)
    counts = {
        "same": sum(a == b for a, b in pairs),
        "prompts": len(pairs),
        "extended": len(extended),
        "extended_same": sum(extended),
        "first": "" if differing is None else _first(tokenizer, *differing),
    }
    return Row(**{**asdict(row), **counts})


def _thoughts(tokenizer: Any, options: dict[str, Any]) -> str:
    if template_comparison.keeps_thoughts(
        tokenizer, {key: value for key, value in options.items() if key == "enable_thinking"}
    ):
        return "kept"
    calling = template_comparison.CALLS[-2]
    try:
        text = tokenizer.decode(template_comparison.render_by_template(tokenizer, calling.messages, calling.tools, {}))
    except Exception:
        return "dropped"
    return "dropped" if template_comparison.THOUGHT in text else "not shown"


def _whole(renderer: Any, tokenizer: Any, kind: Kind, options: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    messages, prompts = conversation(kind)
    tools = [TOOL, ADD] if kind.tools else []
    for length in prompts:
        try:
            theirs = template_comparison.render_by_template(tokenizer, messages[:length], tools, options)
        except Exception:  # two calls in one answer
            continue
        yield (
            renderer.render_ids(copy.deepcopy(messages[:length]), tools=tools or None, add_generation_prompt=True),
            theirs,
        )


def _extended(
    renderer: Any, tokenizer: Any, kind: Kind, options: dict[str, Any]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts that extend the sampled tokens, together with the template's. Each begins with sampled tokens."""
    messages, prompts = conversation(kind)
    tools = [TOOL, ADD] if kind.tools else []
    prompt: list[int] = renderer.render_ids(
        copy.deepcopy(messages[: prompts[0]]), tools=tools or None, add_generation_prompt=True
    )
    for length, next_length in itertools.pairwise(prompts):
        theirs = template_comparison.render_by_template(tokenizer, messages[:next_length], tools, options)
        completion = _completion(renderer, prompt, theirs) or sampled(renderer, copy.deepcopy(messages[length]))
        new = copy.deepcopy(messages[length + 1 : next_length])
        bridged = renderer.bridge_to_next_turn(prompt, completion, new, tools=tools or None)
        if bridged is None:
            prompt = renderer.render_ids(
                copy.deepcopy(messages[:next_length]), tools=tools or None, add_generation_prompt=True
            )
            continue
        assert bridged.token_ids[: len(prompt) + len(completion)] == [*prompt, *completion], "what was sampled is kept"
        prompt = bridged.token_ids
        yield prompt, theirs


def _completion(renderer: Any, prompt: list[int], later: list[int]) -> list[int]:
    """Return the tokens sampled after a prompt, according to the template's later rendering; empty if that differs."""
    stops, begins = set(renderer.get_stop_token_ids()), len(prompt)
    ends = next((i for i in range(begins, len(later)) if later[i] in stops), None)
    return later[begins : ends + 1] if later[:begins] == prompt and ends is not None else []


def _first(tokenizer: Any, ours: list[int], theirs: list[int]) -> str:
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    here, there = (tokenizer.decode(ids[max(at - 20, 0) :][:50]) for ids in (ours, theirs))
    return f"{here!r}, not {there!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = [tried(path.stem, path.read_text()) for path in sorted(options.directory.glob("*.jinja"))]
    for row in rows:
        print(f"{row.model}: {row.renderer}, {row.same} of {row.prompts} prompts as the template has them")
    if options.write:
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""Errors in SFT data are reported before a submission."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primeslurm.plan.checks import sft_files
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data

ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = {"role": "assistant", "content": "4"}
SEEN = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which?"}]}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sh", "arguments": {}}}]}
BROKEN = {"role": "assistant", "tool_calls": [{"function": {"name": "sh", "arguments": "{"}}]}
RIGHT = ({"messages": [ASKED, CALLED, {"role": "tool", "content": "4"}, ANSWERED]}, {"prompt": "a", "completion": "b"})


def said(path: Path, train: str = "last", *, sees: bool = False) -> list[str]:
    vlm = {"vlm": {"freeze_vision_encoder": True}} if sees else {}
    sft = {"data": {"path": str(path), "train": train}}
    model = {"path": "m", **vlm}
    recipe = Recipe.model_validate(recipe_data(task="sft", environments=[], sft=sft, model=model))
    return [str(violation).removeprefix(f"sft.data.path = {path}: ") for violation in sft_files.data_problems(recipe)]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("not json", "not JSON (write one JSON object per line)"),
        ([1], "not a JSON object (write one JSON object per line)"),
        ({"text": "x"}, "has text, but neither `messages` nor `prompt` and `completion`"),
        ({"conversations": [ASKED]}, "has conversations, but neither .* (name them `messages`, each with `role` and"),
        ({"prompt": [ASKED], "completion": "x"}, "prompt and completion must be text (`messages` for conversations)"),
        ({"messages": "hello"}, "messages is not a list of objects"),
        ({"messages": [ASKED, {"from": "human"}]}, "message 2: it has no role"),
        (
            {"messages": [{**ASKED, "role": "human"}, ANSWERED]},
            "message 1: unknown role 'human'",
        ),
        ({"messages": [ASKED, {"role": "assistant"}]}, "message 2: its role is assistant, but it has no content"),
        ({"messages": [ASKED, BROKEN]}, "message 2: the arguments of a call are not JSON"),
        ({"messages": [ASKED, ANSWERED], "tools": [7]}, "tools is not a list of objects"),
        ({"messages": [ASKED]}, "no message has role assistant, so there is nothing to train"),
        ({"messages": [ANSWERED, ASKED]}, "its last message, which would be trained, has role user (`train: all`"),
        ({"messages": [SEEN, ANSWERED]}, "it has images, but `model.vlm` is not set"),
    ],
)
def test_the_first_line_of_each_kind_is_named(line: Any, why: str, tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *RIGHT, "", line, line)
    (found,) = said(path)
    beginning, _, end = why.partition(" .* ")
    assert found.startswith(f"line 4: {beginning}") and end in found, found


def test_all_kinds_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", "{", *RIGHT, {}, "{", {"messages": [ASKED]}, {"messages": [ASKED, ASKED]})
    assert [each.partition(":")[0] for each in said(path)] == ["line 1", "line 4", "line 6"]


def test_valid_conversations_have_no_problems(tmp_path: Path) -> None:
    assert said(write(tmp_path / "text.jsonl", *RIGHT)) == []
    assert said(write(tmp_path / "images.jsonl", {"messages": [SEEN, ANSWERED]}), sees=True) == []
    assert said(write(tmp_path / "all.jsonl", {"messages": [ASKED, ANSWERED, ASKED]}), train="all") == []
    assert said(tmp_path / "elsewhere.jsonl") == []


def test_only_the_beginning_of_the_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_files, "LOOKED_AT", 200)
    long = {"prompt": "x" * 300, "completion": "y"}
    assert said(write(tmp_path / "data.jsonl", *RIGHT[1:], long, "no json")) == []
    assert said(write(tmp_path / "long.jsonl", long)) == [], "its only line is longer than the part that is parsed"
    assert said(write(tmp_path / "empty.jsonl", "", "")) == ["has no conversation (write one JSON object per line)"]

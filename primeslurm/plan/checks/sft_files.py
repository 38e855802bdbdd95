"""Whether the data of SFT is what the trainer reads, by its beginning: no nodes are allocated to find that out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from primeslurm.errors import Violation
from primeslurm.paths import is_file
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import JsonlData

LOOKED_AT = 1 << 20
"""Bytes of the file. The trainer reads all of it, and names any other line."""
_IMAGES = ("image", "image_url")
_KEYS = 5
"""Keys of a line that are shown."""


class _Mistake(NamedTuple):
    why: str
    fix: str = ""


def data_problems(recipe: Recipe) -> list[Violation]:
    """Find lines that are no conversations, the first of each kind; none if the file is not here.

    Args:
        recipe: with the data's absolute path.
    """
    if recipe.task != "sft" or recipe.sft is None or not is_file(path := Path(recipe.sft.data.path)):
        return []
    try:
        lines, size = list(_lines(path)), path.stat().st_size
    except OSError as error:
        return [Violation("sft.data.path", str(path), f"cannot be read: {error.strerror}")]
    if not lines and size < LOOKED_AT:
        return [Violation("sft.data.path", str(path), "holds no conversation", "one JSON object a line")]
    found: dict[_Mistake, int] = {}
    for number, line in lines:
        if (mistake := _mistake(line, recipe.sft.data, sees=recipe.model.vlm is not None)) is not None:
            found.setdefault(mistake, number)
    return [Violation("sft.data.path", str(path), f"line {at}: {each.why}", each.fix) for each, at in found.items()]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines at the beginning of a file that are whole and not empty, and their numbers."""
    with path.open("rb") as file:
        lines = file.read(LOOKED_AT).split(b"\n")
        if file.read(1):
            lines.pop()
    yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _mistake(line: bytes, data: JsonlData, *, sees: bool) -> _Mistake | None:
    try:
        record = json.loads(line)
    except ValueError:
        return _Mistake("no JSON", "one JSON object a line")
    if not isinstance(record, dict):
        return _Mistake("no JSON object", "one JSON object a line")
    if "messages" in record:
        return _of_messages(record["messages"], data, sees=sees)
    if {"prompt", "completion"} <= record.keys():
        texts = isinstance(record["prompt"], str) and isinstance(record["completion"], str)
        return None if texts else _Mistake("prompt and completion must be text", "`messages` for conversations")
    keys = ", ".join(list(record)[:_KEYS]) or "nothing"
    fix = "call them `messages`, each with `role` and `content`" if "conversations" in record else ""
    return _Mistake(f"has {keys}, but neither `messages` nor `prompt` and `completion`", fix)


def _of_messages(messages: Any, data: JsonlData, *, sees: bool) -> _Mistake | None:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return _Mistake("messages is no list of objects", "each with `role` and `content`")
    roles = [each.get("role") for each in messages]
    if not all(isinstance(role, str) for role in roles):
        return _Mistake("a message has no role", "`role: user`, `assistant`, `system` or `tool`")
    if "assistant" not in roles:
        return _Mistake("no message is the assistant's: there is nothing to learn", "`role: assistant`")
    if data.train == "last" and roles[-1] != "assistant":
        why = f"its last message, which is trained, is of role {roles[-1]}"
        return _Mistake(why, "`train: all`, or end conversations with the assistant's answer")
    kinds = {part.get("type") for each in messages for part in _parts(each.get("content"))}
    if not sees and kinds.intersection(_IMAGES):
        return _Mistake("it has images, but `model.vlm` is not set", "`model: {vlm: {freeze_vision_encoder: true}}`")
    return None


def _parts(content: Any) -> list[dict[str, Any]]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []

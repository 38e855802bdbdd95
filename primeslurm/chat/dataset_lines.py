"""Lines of a JSONL data set: parsing, checks that need no tokenizer, and errors by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from primeslurm.base.errors import Violation
from primeslurm.chat import ChatMessage
from primeslurm.chat.messages import ConversationError, MessageForm, normalized, tools_of, without_images

_BLOCK_BYTES = 1 << 20
_MAX_KEYS = 5  # Keys of a record that an error shows


def parse_line(line: bytes, *, images: bool) -> tuple[Any, list[str]]:
    """Return the record of a line of JSON as by `without_images`, and the sources of its images.

    Raise ConversationError if the line is not JSON, or has images although the model is not trained on `images`.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ConversationError("not JSON", "write one JSON object per line") from None
    if not isinstance(record, dict) or "messages" not in record:
        return record, []
    messages, sources = without_images(record["messages"])
    if sources and not images:
        fix = "set `model: {vlm: {freeze_vision_encoder: true}}`"
        raise ConversationError("it has images, but `model.vlm` is not set", fix)
    return {**record, "messages": messages}, sources


class Dialogue(NamedTuple):
    """A line with messages, which are in the form of the chat template."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None


class PlainText(NamedTuple):
    """A line with prompt and completion."""

    prompt: str
    completion: str


def read_record(record: Any, every: bool, form: MessageForm | None = None) -> Dialogue | PlainText:
    """Check and normalize a record of `parse_line`. Raise ConversationError if no model could be trained on it.

    `every` answer of the assistant is trained, or only the last.
    """
    if not isinstance(record, dict):
        raise ConversationError("not a JSON object", "write one JSON object per line")
    if "messages" in record:
        messages, tools = normalized(record["messages"], form), tools_of(record.get("tools"))
        if not any(message["role"] == "assistant" for message in messages):
            raise ConversationError("no message has role assistant, so there is nothing to train", "`role: assistant`")
        if not every and messages[-1]["role"] != "assistant":
            why = f"its last message, which would be trained, has role {messages[-1]['role']}"
            raise ConversationError(why, "`train: all`, or end conversations with the assistant's answer")
        if messages[0]["role"] == "assistant" and (every or len(messages) == 1):
            fix = "start conversations with a message of role user or system"
            fix += ", or use `train: last`" if len(messages) > 1 else ""
            raise ConversationError("no message comes before this answer, so it has no prompt", fix, 1)
        return Dialogue(messages, tools)
    if not {"prompt", "completion"} <= record.keys():
        keys = ", ".join(list(record)[:_MAX_KEYS]) or "nothing"
        fix = "name them `messages`, each with `role` and `content`" if "conversations" in record else ""
        raise ConversationError(f"has {keys}, but neither `messages` nor `prompt` and `completion`", fix)
    if not (isinstance(record["prompt"], str) and isinstance(record["completion"], str)):
        raise ConversationError("prompt and completion must be text", "`messages` for conversations")
    return PlainText(record["prompt"], record["completion"])


def line_number(path: Path, start: int) -> int:
    """Return the number, from 1, of the line that begins at byte `start`."""
    with path.open("rb") as file:
        blocks = (file.read(min(_BLOCK_BYTES, start - done)) for done in range(0, start, _BLOCK_BYTES))
        return 1 + sum(block.count(b"\n") for block in blocks)


class LineErrors:
    """Errors in the lines of a file. Only the first line of each kind of error is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first: dict[tuple[str, str], tuple[int, str]] = {}

    def add(self, error: ConversationError, start: int) -> None:
        shown = f": {error.shown}" if error.shown else ""
        self._first.setdefault((error.why, error.fix), (start, f"{error.where}{error.why}{shown}"))

    def violations(self) -> list[Violation]:
        """Return one violation per kind of error, in the order of the file."""
        errors = sorted((start, text, fix) for (_, fix), (start, text) in self._first.items())
        lines = [(line_number(self._path, start), text, fix) for start, text, fix in errors]
        return [Violation("sft.data.path", str(self._path), f"line {line}: {text}", fix) for line, text, fix in lines]

"""The lines of a JSONL file of conversations, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from primeslurm.base.errors import Violation
from primeslurm.chat.messages import ConversationError, without_images

_BLOCK = 1 << 20
"""Bytes."""


def record_of(line: bytes, *, sees: bool) -> tuple[Any, list[str]]:
    """Read the JSON of a line.

    Args:
        line: of the file.
        sees: the model is trained on images, too.

    Returns:
        What it says, with marks where images are, and where these come from.

    Raises:
        ConversationError: it is no JSON, or has images that cannot be trained on.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ConversationError("no JSON", "one JSON object a line") from None
    if not isinstance(record, dict) or "messages" not in record:
        return record, []
    messages, sources = without_images(record["messages"])
    if sources and not sees:
        fix = "`model: {vlm: {freeze_vision_encoder: true}}`"
        raise ConversationError("it has images, but `model.vlm` is not set", fix)
    return {**record, "messages": messages}, sources


def line_number(path: Path, start: int) -> int:
    """Count the line that begins at a byte of a file, from 1. Raises OSError."""
    with path.open("rb") as file:
        blocks = (file.read(min(_BLOCK, start - done)) for done in range(0, start, _BLOCK))
        return 1 + sum(block.count(b"\n") for block in blocks)


class LineErrors:
    """What is wrong with the lines of a file: the first line of each kind.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first: dict[tuple[str, str], tuple[int, str]] = {}

    def add(self, error: ConversationError, start: int) -> None:
        """Take what is wrong with the line that begins at a byte of the file."""
        shown = f": {error.shown}" if error.shown else ""
        self._first.setdefault((error.why, error.fix), (start, f"{error.where}{error.why}{shown}"))

    def violations(self) -> list[Violation]:
        """Return one violation for each kind, in the order of the file. Raises OSError."""
        found = sorted((start, text, fix) for (_, fix), (start, text) in self._first.items())
        lines = [(line_number(self._path, start), text, fix) for start, text, fix in found]
        return [Violation("sft.data.path", str(self._path), f"line {line}: {text}", fix) for line, text, fix in lines]

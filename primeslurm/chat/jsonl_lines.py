"""Lines of a JSONL file of conversations, and errors in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from primeslurm.base.errors import Violation
from primeslurm.chat.messages import ConversationError, without_images

_BLOCK_BYTES = 1 << 20


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
        """Add the error of the line that begins at byte `start`."""
        shown = f": {error.shown}" if error.shown else ""
        self._first.setdefault((error.why, error.fix), (start, f"{error.where}{error.why}{shown}"))

    def violations(self) -> list[Violation]:
        """Return one violation per kind of error, in the order of the file."""
        errors = sorted((start, text, fix) for (_, fix), (start, text) in self._first.items())
        lines = [(line_number(self._path, start), text, fix) for start, text, fix in errors]
        return [Violation("sft.data.path", str(self._path), f"line {line}: {text}", fix) for line, text, fix in lines]

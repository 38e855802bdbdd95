"""Texts of runs in a form that a browser can show: without control sequences, and as valid JSON."""

from __future__ import annotations

import re
from typing import Any

import msgspec

# Most characters of a line that are shown.
MAX_LINE = 4000
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Return a text without escape sequences, control characters except tab and newline, and direction marks."""
    return _CONTROL.sub("", _ESCAPES.sub("", text))


def clean_line(line: bytes) -> str:
    """Decode a line of any program. A long line is truncated, and its end says how much is missing."""
    # Escape sequences are short. Cleaning ten times what is shown keeps lines of many megabytes cheap.
    text = clean(line[: 10 * MAX_LINE].decode(errors="replace"))
    if len(text) <= MAX_LINE and len(line) <= 10 * MAX_LINE:
        return text
    return f"{text[:MAX_LINE]} … ({len(line):,} bytes)"


def encode(value: Any) -> bytes:
    """Encode an answer as JSON. Numbers that are not finite become null."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a file name that is not UTF-8, or half of a surrogate pair in an event
        return msgspec.json.encode(_encodable(msgspec.to_builtins(value, str_keys=True)))


def encodable(text: str) -> str:
    """Return a text whose lone surrogates, which UTF-8 lacks, are question marks."""
    return text.encode(errors="replace").decode()


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return encodable(value)
        case dict():
            return {encodable(key): _encodable(item) for key, item in value.items()}
        case list() | tuple():
            return [_encodable(item) for item in value]
    return value

"""Differences between the fields of two recipes. Pure. Names of runs are not compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

# Values of fields that are not set.
_UNSET: tuple[Any, ...] = (None, [], {})
# Fields of a recipe that say nothing about what a run does.
_NOT_COMPARED = ("schema", "name")


class Difference(msgspec.Struct, frozen=True):
    """A field that differs. `a` or `b` is None if that side does not have it."""

    field: str
    a: str | None
    b: str | None


def recipe_diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return the fields that differ between two recipes, given as plain data."""
    return [
        Difference(path, _text(one), _text(other))
        for key in dict.fromkeys((*a, *b))
        if key not in _NOT_COMPARED
        for path, one, other in _changed(key, a.get(key), b.get(key))
    ]


def _changed(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if a == b or (a in _UNSET and b in _UNSET):
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys((*a, *b)):
            yield from _changed(f"{path}.{key}", a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and isinstance(a[0], Mapping):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _changed(f"{path}.{i}", one, other)
    else:
        yield path, a, b


def _text(value: Any) -> str | None:
    """Return a value as one line of YAML, without fields that are not set."""
    if isinstance(value, Mapping):
        fields = {key: _text(field) for key, field in value.items() if field not in _UNSET}
        return f"{{{', '.join(f'{key}: {text}' for key, text in fields.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(str(_text(item)) for item in value)}]"
    return value if isinstance(value, str) else None if value is None else json.dumps(value)

"""All places of a pydantic model that may hold a string, with data that reaches each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from primeslurm.recipe.fields.section import members

Path = tuple[str | int, ...]
KEY = "KEY1"
"""A key for mappings, valid as the name of a variable, an option and a node."""
WORD = "x1"
"""A string that most required fields accept."""
OTHER_WORDS = {"function": "package.module:x1", "base_url": "http://x1"}
"""Required fields that need another value."""


def places(model: type[BaseModel], path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield (path, data) for every string. `data` is the smallest value that reaches it, and has WORD there."""
    for name, info in model.model_fields.items():
        key = info.alias or name
        required = _required(model)
        for below, value in _values(info.annotation):
            yield (key, *below), {**required, key: value}


def _required(model: type[BaseModel]) -> dict[str, Any]:
    """Return sample values of the required fields of a section."""
    values: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if name == "type":
            values[name] = info.default
        elif info.is_required():
            values[info.alias or name] = OTHER_WORDS.get(name) or _sample(info.annotation)
    return values


def _sample(annotation: Any) -> Any:
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return _required(member)
        if get_origin(member) is Literal:
            return get_args(member)[0]
        if get_origin(member) is dict:
            return {KEY: _sample(get_args(member)[1])}
        return 1 if member is int else WORD
    raise TypeError(f"no sample for {annotation}")


def _values(annotation: Any) -> Iterator[tuple[Path, Any]]:
    """Yield (path below, value) for every string that an annotation allows."""
    for member in members(annotation):
        origin, args = get_origin(member), get_args(member)
        if member is str:
            yield (), WORD
        elif origin is tuple:
            for below, value in _values(args[0]):
                yield (0, *below), [value]
        elif origin is dict:
            yield from _entries(args[1])
        elif isinstance(member, type) and issubclass(member, BaseModel):
            yield from places(member)


def _entries(annotation: Any) -> Iterator[tuple[Path, Any]]:
    if object in members(annotation):  # any value: a string, and strings below
        yield (KEY,), {KEY: WORD}
        yield (KEY, 0), {KEY: [WORD]}
        yield (KEY, "inner"), {KEY: {"inner": WORD}}
        return
    for below, value in _values(annotation):
        yield (KEY, *below), {KEY: value}


def put(data: Any, path: Path, value: str) -> Any:
    """Return a copy of nested data with another value at `path`. The last part may be a key, which is then renamed."""
    if not path:
        return value
    head, *rest = path
    if isinstance(data, list):
        return [put(item, tuple(rest), value) if i == head else item for i, item in enumerate(data)]
    return {key: put(item, tuple(rest), value) if key == head else item for key, item in data.items()}

"""Sound variants of a recipe or site with faults, so that its other parts can be checked in the same pass.

Each variant has other values in the faulty fields. What a check finds in all variants does not depend on these fields.
What it finds in some of them may be a consequence of a fault that was reported already.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from primeslurm.base.errors import Violation
from primeslurm.recipe.reading.explain import InputFault, faults, field_type, members

M = TypeVar("M", bound=BaseModel)
KeyPath = tuple[str, ...]
Rules = Callable[[M], Sequence[Violation]]

MOST = 6
"""Most variants. More values per field find few more dependent findings, and each variant is planned."""
_ROUNDS = 30
"""Most corrections of one variant: some corrections make others necessary."""
_PLACEHOLDERS: dict[KeyPath, Any] = {
    ("name",): "unnamed",
    ("seq_len",): 2048,
    ("model",): {"path": "primeslurm/unknown"},
    ("model", "path"): "primeslurm/unknown",
    ("environments",): [{"id": "reverse-text"}],
    ("environments", "*"): {"id": "reverse-text"},
    ("environments", "*", "id"): "reverse-text",
    ("evaluation", "environments", "*", "id"): "reverse-text",
    ("sft",): {"data": {"type": "jsonl", "path": "unknown.jsonl"}},
    ("sft", "data"): {"type": "jsonl", "path": "unknown.jsonl"},
    ("sft", "data", "path"): "unknown.jsonl",
    ("inference", "gpu_memory_utilization"): 0.4,
    ("device",): "cuda",
    ("runs",): "runs",
    ("nodes",): {"default": {"partition": "unknown", "gpus": 8, "cpus": 192}},
    ("nodes", "*", "partition"): "unknown",
    ("nodes", "*", "cpus"): 192,
}
"""Values of fields that have no default, or not always one that is sound. `*` stands for any key or index."""
_NEAREST = re.compile(r"nearest: ([^,;(]+)")
_DROP = object()


def path_of(field: str) -> KeyPath:
    """Split a field, as a violation names it, into keys and indices."""
    return tuple(field.split("."))


def sound_variants(model: type[M], data: Mapping[str, Any], found: Sequence[InputFault], rules: Rules[M]) -> list[M]:
    """Make sound variants of faulty input.

    Args:
        model: what the input is validated as.
        data: the input.
        found: its faults.
        rules: finds what contradicts something else in validated input.

    Returns:
        At most `MOST`, which differ; none if the faults cannot be repaired.
    """
    choices = [_corrections(model, data, fault) for fault in found if fault.path]
    made: list[M] = []
    for turn in range(MOST):
        changed: Any = data
        for corrections in choices:
            for path, value in corrections[turn % len(corrections)]:
                changed = _drop(changed, path) if value is _DROP else _edited(changed, path, value)
        sound = _settled(model, changed, rules)
        if sound is not None and sound not in made:
            made.append(sound)
    return made


Correction = list[tuple[KeyPath, Any]]
"""Values to set. `_DROP` leaves the field to its default."""


def _corrections(model: type[BaseModel], data: Mapping[str, Any], fault: InputFault) -> list[Correction]:
    """List ways to correct a fault: by the value that was probably meant, by the default, and by others."""
    path, given = fault.path, _get(data, fault.path)
    if fault.meant:
        return [[(path, _DROP), (path_of(fault.meant), given)], [(path, _DROP)]]
    near = _NEAREST.search(fault.violation.fix)
    values: list[Any] = [_plain(near[1])] if near else []
    values += [_DROP, *_others(_types(model, path), given)]
    return [[(path, value)] for i, value in enumerate(values) if value not in values[:i]]


def _plain(text: str) -> int | float | str:
    """Read a value that a message names."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text.strip("\"' ")


def _others(types: Sequence[Any], given: Any) -> Iterator[Any]:
    """List values that a field may have."""
    for kind in types:
        if get_origin(kind) is Literal:
            yield from get_args(kind)
        elif kind is bool:
            yield from (False, True)
        elif kind is int or kind is float:
            base = given if isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < 1e6 else 1
            yield from (kind(1), kind(base * 2), kind(base * 8), kind(64))
        elif get_origin(kind) is tuple and isinstance(given, list) and len(given) > 1:
            yield given[:1]
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            tag = field_type(kind, "type")
            yield {"type": get_args(tag)[0]} if tag is not None and get_args(tag) else {}


def _types(model: type[BaseModel], path: KeyPath) -> list[Any]:
    """List the types that a field may have; of a union, those of all its sections that have the field."""
    types: list[Any] = [model]
    for part in path:
        below: list[Any] = []
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                below += members(field_type(kind, part))
            elif get_origin(kind) in (tuple, dict):
                below += members(get_args(kind)[0 if get_origin(kind) is tuple else 1])
        types = [kind for kind in below if kind is not None]
    return types


def _settled(model: type[M], data: Any, rules: Rules[M]) -> M | None:
    """Drop what is still faulty, until nothing is; None if that does not end."""
    dropped = Counter[KeyPath]()
    for _ in range(_ROUNDS):
        try:
            value = model.model_validate(data)
        except ValidationError as error:
            wrong = [fault.path for details in error.errors() for fault in faults(model, details, "")]
        else:
            wrong = [path_of(violation.field) for violation in rules(value)]
            if not wrong:
                return value
        for path in wrong:
            while dropped[path] > 1:  # to drop it once more would change nothing: its section is at fault
                path = path[:-1]
            if not path:
                return None
            data = _drop(data, path, wholly=dropped[path] > 0)
            dropped[path] += 1
    return None


def _drop(data: Any, path: KeyPath, *, wholly: bool = False) -> Any:
    """Return the input without a field: with its placeholder, unless it is to be wholly gone."""
    found = (value for pattern, value in _PLACEHOLDERS.items() if _matches(path, pattern))
    placeholder = _DROP if wholly else next(found, _DROP)
    return _edited(data, path, placeholder)


def _edited(node: Any, path: KeyPath, value: Any) -> Any:
    """Return a copy of the input with a value at a path; without the field, if the value is `_DROP`."""
    key, below = path[0], path[1:]
    if isinstance(node, list):
        if not key.isdecimal():  # some rules name a field of all entries
            return [_edited(each, path, value) for each in node]
        at = int(key)
        if at >= len(node):
            return node
        edited = [_edited(node[at], below, value)] if below else [] if value is _DROP else [value]
        return [*node[:at], *edited, *node[at + 1 :]]
    if not isinstance(node, Mapping):
        if value is _DROP:
            return node
        node = {}
    others = {k: v for k, v in node.items() if str(k) != key}
    if not below:
        return others if value is _DROP else {**others, key: value}
    if value is _DROP and len(others) == len(node):
        return node
    return {**others, key: _edited(_get(node, (key,)), below, value)}


def _get(data: Any, path: KeyPath) -> Any:
    """Return what the input has at a path; None if it has nothing."""
    for part in path:
        if isinstance(data, Mapping):
            data = next((value for key, value in data.items() if str(key) == part), None)
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data


def _matches(path: KeyPath, pattern: KeyPath) -> bool:
    return len(path) == len(pattern) and all(want in ("*", part) for part, want in zip(path, pattern, strict=True))

"""Valid variants of a faulty recipe or site file, so that the other parts can be checked in the same pass.

Each variant has other values in the faulty fields. A finding that all variants share does not depend on these fields. A
finding that only some variants have may be a consequence of a fault that is reported already.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from primeslurm.base.errors import Violation
from primeslurm.recipe.fields.section import field_type, members
from primeslurm.recipe.reading.validation_errors import InputFault, faults

M = TypeVar("M", bound=BaseModel)
KeyPath = tuple[str, ...]
Rules = Callable[[M], Sequence[Violation]]

# More variants would exclude few more findings, and every variant is planned.
MAX_VARIANTS = 6
# Corrections of one variant may make further corrections necessary.
_MAX_ROUNDS = 30
# Values of fields whose default is missing or may be invalid. `*` matches any key or index.
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
_NEAREST = re.compile(r"nearest: ([^,;(]+)")
# Stands for a missing value: the field is removed, so that it has its default.
_DROP = object()
# Values to set, by path.
Correction = list[tuple[KeyPath, Any]]


def path_of(field: str) -> KeyPath:
    """Split the dotted field of a violation into keys and indices."""
    return tuple(field.split("."))


def valid_variants(
    model: type[M], data: Mapping[str, Any], input_faults: Sequence[InputFault], rules: Rules[M]
) -> list[M]:
    """Make valid variants of faulty input.

    Args:
        input_faults: all faults of the input. Faults without a path are ignored.

    Returns:
        At most `MAX_VARIANTS` different variants; none if the faults cannot be corrected.
    """
    choices = [_corrections(model, data, fault) for fault in input_faults if fault.path]
    variants: list[M] = []
    for turn in range(MAX_VARIANTS):
        changed: Any = data
        for corrections in choices:
            for path, value in corrections[turn % len(corrections)]:
                changed = _drop(changed, path) if value is _DROP else _edited(changed, path, value)
        variant = _drop_invalid(model, changed, rules)
        if variant is not None and variant not in variants:
            variants.append(variant)
    return variants


def _corrections(model: type[BaseModel], data: Mapping[str, Any], fault: InputFault) -> list[Correction]:
    """List ways to correct a fault: the value that was probably meant first, then the default, then other values."""
    path, value = fault.path, _get(data, fault.path)
    if fault.meant:
        return [[(path, _DROP), (path_of(fault.meant), value)], [(path, _DROP)]]
    nearest = _NEAREST.search(fault.violation.fix)
    values: list[Any] = [_scalar(nearest[1])] if nearest else []
    values += [_DROP, *_other_values(_types(model, path), value)]
    return [[(path, each)] for i, each in enumerate(values) if each not in values[:i]]


def _scalar(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text.strip("\"' ")


def _other_values(types: Sequence[Any], value: Any) -> Iterator[Any]:
    """List valid values of a field with these types."""
    for kind in types:
        if get_origin(kind) is Literal:
            yield from get_args(kind)
        elif kind is bool:
            yield from (False, True)
        elif kind is int or kind is float:
            # Multiples of the value often satisfy rules about divisibility.
            base = value if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6 else 1
            yield from (kind(1), kind(base * 2), kind(base * 8), kind(64))
        elif get_origin(kind) is tuple and isinstance(value, list) and len(value) > 1:
            yield value[:1]
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            tag = field_type(kind, "type")
            yield {"type": get_args(tag)[0]} if tag is not None and get_args(tag) else {}


def _types(model: type[BaseModel], path: KeyPath) -> list[Any]:
    """List the types of a field. If a union of sections is on the path, all sections with the field count."""
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


def _drop_invalid(model: type[M], data: Any, rules: Rules[M]) -> M | None:
    """Drop invalid fields until the input is valid; return None if that does not succeed."""
    times_dropped = Counter[KeyPath]()
    for _ in range(_MAX_ROUNDS):
        try:
            value = model.model_validate(data)
        except ValidationError as error:
            paths = [fault.path for details in error.errors() for fault in faults(model, details, "")]
        else:
            paths = [path_of(violation.field) for violation in rules(value)]
            if not paths:
                return value
        for path in paths:
            # The field has been dropped already, so its section must be the cause.
            while times_dropped[path] > 1:
                path = path[:-1]
            if not path:
                return None
            data = _drop(data, path, use_placeholder=times_dropped[path] == 0)
            times_dropped[path] += 1
    return None


def _drop(data: Any, path: KeyPath, *, use_placeholder: bool = True) -> Any:
    placeholders = (
        value
        for pattern, value in _PLACEHOLDERS.items()
        if len(path) == len(pattern) and all(want in ("*", part) for part, want in zip(path, pattern, strict=True))
    )
    return _edited(data, path, next(placeholders, _DROP) if use_placeholder else _DROP)


def _edited(node: Any, path: KeyPath, value: Any) -> Any:
    """Return a copy of the input with a value at a path, or without the field if the value is `_DROP`."""
    key, below = path[0], path[1:]
    if isinstance(node, list):
        # Some rules name a field of all entries, without an index.
        if not key.isdecimal():
            return [_edited(each, path, value) for each in node]
        at = int(key)
        if at >= len(node):
            return node
        edited = [_edited(node[at], below, value)] if below else [] if value is _DROP else [value]
        return [*node[:at], *edited, *node[at + 1 :]]
    if not isinstance(node, Mapping):
        if value is _DROP:
            return node
        # A single value stands where a section belongs.
        node = {}
    others = {k: v for k, v in node.items() if str(k) != key}
    if not below:
        return others if value is _DROP else {**others, key: value}
    if value is _DROP and len(others) == len(node):
        return node
    return {**others, key: _edited(_get(node, (key,)), below, value)}


def _get(data: Any, path: KeyPath) -> Any:
    """Return the value at a path; None if there is none."""
    for part in path:
        if isinstance(data, Mapping):
            data = next((value for key, value in data.items() if str(key) == part), None)
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data

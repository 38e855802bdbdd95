"""Differences between the fields and the plans of two recipes. Pure.

Names and directories of runs are not compared, so two runs of one recipe are equal. A change that many processes share
is one difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from primeslurm.plan.model import HetGroup, JobOptions, Node, Plan, Process, Replica, Totals

PRESENT = "present"
# Path of a value to the value as text.
Leaves = dict[str, str]
Part = Plan | JobOptions | Totals | HetGroup | Replica | Process
T = TypeVar("T")

# Fields of a part that are a part of their own, name it, or are compared in another form.
NOT_COMPARED: dict[type[Part], frozenset[str]] = {
    Plan: frozenset({"run", "job", "groups", "nodes", "replicas", "totals", "findings"}),
    JobOptions: frozenset({"name"}),
    Process: frozenset({"name", "role", "log", "argv"}),
}
# Values of fields that are not set.
_UNSET: tuple[Any, ...] = (None, [], {})
# Fields of a recipe that say nothing about what a run does.
RECIPE_NOT_COMPARED = ("schema", "name")


class Difference(msgspec.Struct, frozen=True):
    """A value that differs. `a` or `b` is None if that side does not have it."""

    where: str  # "recipe", or the part of the plan: job, totals, group train, replica 0, or the role of processes
    field: str
    a: str | None
    b: str | None
    members: list[str] = []  # processes that have this difference


def diff(a: Plan, b: Plan) -> list[Difference]:
    """Return all differences between two plans: first the totals, then groups, replicas and processes."""
    one, other = _Side(a), _Side(b)
    differences: list[Difference] = []
    for where, ours, theirs in _parts(one, other):
        differences += _compare(where, ours, theirs)
    return differences + _processes(one, other)


def recipe_diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return the fields that differ between two recipes, given as plain data."""
    return [
        Difference("recipe", path, _text(one), _text(other))
        for key in dict.fromkeys((*a, *b))
        if key not in RECIPE_NOT_COMPARED
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


@dataclass(frozen=True)
class _Side:
    """One of the two plans. The path of the run directory is replaced in all of its values."""

    plan: Plan

    def flat(self, part: Part, *, sets: bool = False) -> Leaves:
        """Return the fields of a part that are compared."""
        value = part.model_dump(mode="json", by_alias=True, exclude=set(NOT_COMPARED.get(type(part), ())))
        fields = leaves(value, sets=sets)
        return {self._neutral(name): self._neutral(text) for name, text in fields.items()}

    def whole(self, part: HetGroup | Replica | None, counterpart: HetGroup | Replica | None) -> Leaves:
        """Return the fields of a part. If the other plan has no such part, return all of them as one value."""
        if part is None:
            return {}
        fields = self.flat(part, sets=True)
        if counterpart is None:
            return {"": " ".join(f"{name}={value}" for name, value in fields.items() if value not in ("null", PRESENT))}
        return fields

    def process(self, node: Node, process: Process) -> Leaves:
        """Return the options and fields of a process, and its position among the nodes of its role."""
        argv = options([self._neutral(word) for word in process.argv])
        return {
            **{f"argv {name}": value for name, value in argv.items()},
            **self.flat(process, sets=True),
            "on": f"{node.role}[{node.index_in_group}]",
        }

    def placed(self) -> list[tuple[Node, Process]]:
        return [(node, process) for node in self.plan.nodes for process in node.processes]

    def _neutral(self, text: str) -> str:
        return text.replace(self.plan.run_dir, "${run_dir}")


def _parts(a: _Side, b: _Side) -> Iterator[tuple[str, Leaves, Leaves]]:
    """Yield name and fields on both sides of each part, except processes."""
    yield "run", a.flat(a.plan), b.flat(b.plan)
    yield "totals", a.flat(a.plan.totals), b.flat(b.plan.totals)
    yield "job", a.flat(a.plan.job), b.flat(b.plan.job)
    for group, ours, theirs in _paired(a.plan.groups, b.plan.groups, lambda group: group.name):
        yield f"group {group.name}", a.whole(ours, theirs), b.whole(theirs, ours)
    for replica, mine, its in _paired(a.plan.replicas, b.plan.replicas, lambda replica: replica.index):
        yield f"replica {replica.index}", a.whole(mine, its), b.whole(its, mine)


def _paired(a: Iterable[T], b: Iterable[T], key: Callable[[T], str | int]) -> Iterator[tuple[T, T | None, T | None]]:
    """Yield, for each key, one of the items and the items of both sides."""
    one, other = {key(item): item for item in a}, {key(item): item for item in b}
    for name, item in [*one.items(), *((name, item) for name, item in other.items() if name not in one)]:
        yield item, one.get(name), other.get(name)


def _compare(where: str, a: Leaves, b: Leaves) -> list[Difference]:
    fields = [*a, *(field for field in b if field not in a)]
    return [Difference(where, f, a.get(f), b.get(f)) for f in fields if a.get(f) != b.get(f)]


def _processes(a: _Side, b: _Side) -> list[Difference]:
    """Compare processes by name. Changes that several processes of a role share are merged."""
    shared: dict[tuple[str, str, str | None, str | None], list[str]] = {}
    for (_, process), one, other in _paired(a.placed(), b.placed(), lambda placed: placed[1].name):
        if one is None or other is None:
            changes = [Difference(process.role, "process", PRESENT if one else None, PRESENT if other else None)]
        else:
            changes = _compare(process.role, a.process(*one), b.process(*other))
        for change in changes:
            shared.setdefault((process.role, change.field, change.a, change.b), []).append(process.name)
    return [Difference(*key, members=names) for key, names in shared.items()]


def options(argv: Sequence[str]) -> Leaves:
    """Split a command line into options: `--x 1 --flag --j {...}`. Values that are JSON or lists are split, too."""
    values_by_option: dict[str, list[str]] = {}
    current = "command"
    for word in argv:
        if word.startswith("--"):
            current, _, value = word.partition("=")
            values_by_option.setdefault(current, []).extend([value] if value else [])
        else:
            values_by_option.setdefault(current, []).append(word)
    result: Leaves = {}
    for name, values in values_by_option.items():
        result |= _option(name, values)
    return result


def _option(name: str, values: Sequence[str]) -> Leaves:
    if len(values) == 1 and values[0].startswith("{"):
        try:
            return leaves(json.loads(values[0]), name)
        except json.JSONDecodeError:
            pass
    parts = [part for value in values for part in value.split(",")]
    if len(parts) > 1 and name != "command":
        # Lists of peers: one that was added is one difference, not a new list.
        return {f"{name} {part}": PRESENT for part in parts}
    return {name: " ".join(values) or "set"}


def leaves(value: Any, path: str = "", *, sets: bool = False) -> Leaves:
    """Flatten nested JSON data into paths and values.

    `path` is put before all paths. With `sets`, the order of plain values in a list is ignored.
    """
    if isinstance(value, list) and sets and all(isinstance(item, str | int) for item in value):
        return {f"{path} {item}": PRESENT for item in value}
    if isinstance(value, Mapping):
        children: Iterator[tuple[str, Any]] = iter(value.items())
    elif isinstance(value, list):
        children = ((str(i), item) for i, item in enumerate(value))
    else:
        return {path: value if isinstance(value, str) else json.dumps(value)}
    flat: Leaves = {}
    for key, child in children:
        flat |= leaves(child, f"{path}.{key}" if path else key, sets=sets)
    return flat

"""How two recipes differ, and how their plans do: nodes, components, processes, options. Pure.

Names and directories of runs are not compared, so two runs of one recipe are the same. A change that many processes
share is one difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from primeslurm.plan.model import HetGroup, JobOptions, Node, Plan, Process, Replica, Totals

PRESENT = "present"
Leaves = dict[str, str]
"""Path of a value to the value as text."""
Part = Plan | JobOptions | Totals | HetGroup | Replica | Process
T = TypeVar("T")

NOT_COMPARED: dict[type[Part], frozenset[str]] = {
    Plan: frozenset({"run", "job", "groups", "nodes", "replicas", "totals", "findings"}),
    JobOptions: frozenset({"name"}),
    Process: frozenset({"name", "role", "log", "argv"}),
}
"""Fields of a part that are a part of their own, name it, or are compared in another form."""
_UNSET: tuple[Any, ...] = (None, [], {})
"""Values of fields that are not set."""
RECIPE_NOT_COMPARED = ("schema", "name")
"""Fields of a recipe that say nothing about what a run does."""


class Difference(msgspec.Struct, frozen=True):
    """One value that differs. None: only the other side has it."""

    where: str
    """recipe, or the part of the plan: job, totals, group train, replica 0, or the role of processes."""
    field: str
    a: str | None
    b: str | None
    members: list[str] = []
    """Processes with this same difference."""


def diff(a: Plan, b: Plan) -> list[Difference]:
    """Return every difference, from the whole to the parts; empty if the plans are the same."""
    left, right = _Side(a), _Side(b)
    found: list[Difference] = []
    for where, one, other in _parts(left, right):
        found += _compare(where, one, other)
    return found + _processes(left, right)


def recipe_diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return the fields of two recipes that differ, as plain data."""
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
    """A value as YAML writes it in one line, without the fields that are not set."""
    if isinstance(value, Mapping):
        fields = {key: _text(field) for key, field in value.items() if field not in _UNSET}
        return f"{{{', '.join(f'{key}: {text}' for key, text in fields.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(str(_text(item)) for item in value)}]"
    return value if isinstance(value, str) else None if value is None else json.dumps(value)


@dataclass(frozen=True)
class _Side:
    """One of the plans. What it says of itself does not name its run's directory."""

    plan: Plan

    def flat(self, part: Part, *, sets: bool = False) -> Leaves:
        """The fields of a part that are compared."""
        value = part.model_dump(mode="json", by_alias=True, exclude=set(NOT_COMPARED.get(type(part), ())))
        found = leaves(value, sets=sets)
        return {self._neutral(name): self._neutral(text) for name, text in found.items()}

    def whole(self, part: HetGroup | Replica | None, counterpart: HetGroup | Replica | None) -> Leaves:
        """The fields of a part, or, if the other plan has nothing like it, all of it as one value."""
        if part is None:
            return {}
        found = self.flat(part, sets=True)
        if counterpart is None:
            return {"": " ".join(f"{name}={value}" for name, value in found.items() if value not in ("null", PRESENT))}
        return found

    def process(self, node: Node, process: Process) -> Leaves:
        """A process: its options, everything else, and the place of its node."""
        argv = options([self._neutral(word) for word in process.argv])
        return {
            **{f"argv {name}": value for name, value in argv.items()},
            **self.flat(process, sets=True),
            "on": f"{node.role}[{node.index_in_group}]",
        }

    def placed(self) -> list[tuple[Node, Process]]:
        """Every process with its node."""
        return [(node, process) for node in self.plan.nodes for process in node.processes]

    def _neutral(self, text: str) -> str:
        return text.replace(self.plan.run_dir, "${run_dir}")


def _parts(a: _Side, b: _Side) -> Iterator[tuple[str, Leaves, Leaves]]:
    """The parts other than processes, side by side."""
    yield "run", a.flat(a.plan), b.flat(b.plan)
    yield "totals", a.flat(a.plan.totals), b.flat(b.plan.totals)
    yield "job", a.flat(a.plan.job), b.flat(b.plan.job)
    for group, ours, theirs in _paired(a.plan.groups, b.plan.groups, lambda group: group.name):
        yield f"group {group.name}", a.whole(ours, theirs), b.whole(theirs, ours)
    for replica, mine, its in _paired(a.plan.replicas, b.plan.replicas, lambda replica: replica.index):
        yield f"replica {replica.index}", a.whole(mine, its), b.whole(its, mine)


def _paired(a: Iterable[T], b: Iterable[T], key: Callable[[T], str | int]) -> Iterator[tuple[T, T | None, T | None]]:
    """Things of one key: one that there is, and those of each side."""
    one, other = {key(item): item for item in a}, {key(item): item for item in b}
    for name, item in [*one.items(), *((name, item) for name, item in other.items() if name not in one)]:
        yield item, one.get(name), other.get(name)


def _compare(where: str, a: Leaves, b: Leaves) -> list[Difference]:
    fields = [*a, *(field for field in b if field not in a)]
    return [Difference(where, f, a.get(f), b.get(f)) for f in fields if a.get(f) != b.get(f)]


def _processes(a: _Side, b: _Side) -> list[Difference]:
    """By name; changes that several processes of a role share are put together."""
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
    """Take a command line apart: `--x 1 --flag --j {...}`, option by option, and values that are JSON or lists."""
    found: dict[str, list[str]] = {}
    current = "command"
    for word in argv:
        if word.startswith("--"):
            current, _, value = word.partition("=")
            found.setdefault(current, []).extend([value] if value else [])
        else:
            found.setdefault(current, []).append(word)
    result: Leaves = {}
    for name, values in found.items():
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
    """Flatten nested data into paths and values.

    Args:
        value: what JSON can hold.
        path: of this value, before those of its parts.
        sets: the order of plain values in a list means nothing.
    """
    if isinstance(value, list) and sets and all(isinstance(item, str | int) for item in value):
        return {f"{path} {item}": PRESENT for item in value}
    if isinstance(value, Mapping):
        children: Iterator[tuple[str, Any]] = iter(value.items())
    elif isinstance(value, list):
        children = ((str(i), item) for i, item in enumerate(value))
    else:
        return {path: value if isinstance(value, str) else json.dumps(value)}
    found: Leaves = {}
    for key, child in children:
        found |= leaves(child, f"{path}.{key}" if path else key, sets=sets)
    return found

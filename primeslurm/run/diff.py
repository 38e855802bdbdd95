"""How two Plans differ, in words of the plan: nodes, components, processes, options. Pure.

Names and directories of the runs are left out: two runs of one recipe are the same. A change that many processes share
is told once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from primeslurm.plan.model import Plan

PRESENT = "present"
Items = list[dict[str, Any]]
Leaves = dict[str, str]
"""Path of a value to the value as text."""


class Difference(msgspec.Struct, frozen=True):
    """One value that differs. None: it is not there."""

    where: str
    """The part of the plan: job, totals, group train, replica 0, or a process with its node's role."""
    field: str
    a: str | None
    b: str | None
    members: list[str] = []
    """Processes with this same difference."""


def diff(a: Plan, b: Plan) -> list[Difference]:
    """Return every difference, from the whole to the parts; empty if the plans are the same."""
    left, right = _neutral(a), _neutral(b)
    found: list[Difference] = []
    for where, one, other in _parts(left, right):
        found += _compare(where, one, other)
    return found + _processes(left, right)


def _neutral(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, without the run's name and directory."""
    text = plan.to_json()
    value: dict[str, Any] = json.loads(text.replace(json.dumps(plan.run_dir)[1:-1], "${run_dir}"))
    value["run"], value["job"]["name"] = "", ""
    return value


def _parts(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, Leaves, Leaves]]:
    """The parts other than processes, side by side."""
    apart = ("job", "groups", "nodes", "replicas", "totals", "findings")
    one, other = ({key: value for key, value in plan.items() if key not in apart} for plan in (a, b))
    yield "run", leaves(one), leaves(other)
    yield "totals", leaves(a["totals"]), leaves(b["totals"])
    yield "job", leaves(a["job"]), leaves(b["job"])
    for name, group, its in _paired(a["groups"], b["groups"], "name"):
        yield f"group {name}", _whole(group, its), _whole(its, group)
    for name, replica, its in _paired(a["replicas"], b["replicas"], "index"):
        yield f"replica {name}", _whole(replica, its), _whole(its, replica)


def _paired(a: Items, b: Items, key: str) -> Iterator[tuple[str, dict[str, Any] | None, dict[str, Any] | None]]:
    one, other = {item[key]: item for item in a}, {item[key]: item for item in b}
    for name in [*one, *(name for name in other if name not in one)]:
        yield name, one.get(name), other.get(name)


def _whole(item: dict[str, Any] | None, counterpart: dict[str, Any] | None) -> Leaves:
    """The fields of an item, or, if the other plan has nothing like it, all of it as one value."""
    if item is None:
        return {}
    found = leaves(item, sets=True)
    if counterpart is None:
        return {"": " ".join(f"{name}={value}" for name, value in found.items() if value not in ("null", PRESENT))}
    return found


def _compare(where: str, a: Leaves, b: Leaves) -> list[Difference]:
    fields = [*a, *(field for field in b if field not in a)]
    return [Difference(where, f, a.get(f), b.get(f)) for f in fields if a.get(f) != b.get(f)]


def _processes(a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    """By name; changes that several processes of a role share are put together."""
    shared: dict[tuple[str, str, str | None, str | None], list[str]] = {}
    for name, one, other in _paired(_flat(a), _flat(b), "name"):
        role = (one or other or {})["role"]
        if one is None or other is None:
            changes = [Difference(role, "process", PRESENT if one else None, PRESENT if other else None)]
        else:
            changes = _compare(role, _process_leaves(one), _process_leaves(other))
        for change in changes:
            shared.setdefault((role, change.field, change.a, change.b), []).append(name)
    return [Difference(*key, members=names) for key, names in shared.items()]


def _flat(plan: dict[str, Any]) -> Items:
    """Every process with the place of its node."""
    return [
        {**process, "on": f"{node['role']}[{node['index_in_group']}]"}
        for node in plan["nodes"]
        for process in node["processes"]
    ]


def _process_leaves(process: Mapping[str, Any]) -> Leaves:
    rest = {key: value for key, value in process.items() if key not in ("argv", "name", "role", "log")}
    return {**{f"argv {k}": v for k, v in options(process["argv"]).items()}, **leaves(rest, sets=True)}


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

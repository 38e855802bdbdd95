"""How a Plan is kept in a file: each command once, and of each process a row of numbers (`plan.storage.folding`).

A plan of a thousand nodes has eight thousand processes and three dozen commands, and every agent reads it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import msgspec

from primeslurm.plan.model import Plan
from primeslurm.plan.storage.folding import Json, fold, unfold

_FOLDED = ("nodes", "processes", "replicas")


def to_file(plan: Plan) -> str:
    """Write a plan: same plan, same text. Nodes hold the number of their processes, which follow one another."""
    value = plan.model_dump(mode="json", by_alias=True)
    processes = [process for node in value["nodes"] for process in node["processes"]]
    nodes = [{**node, "processes": len(node["processes"])} for node in value["nodes"]]
    folded = {"nodes": fold(nodes), "processes": fold(processes), "replicas": fold(value["replicas"])}
    parts = [f"{json.dumps(name)}: {_line(part)}" for name, part in value.items() if name not in _FOLDED]
    parts += [f"{json.dumps(name)}: {_lines(folded[name])}" for name in _FOLDED]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def from_file(data: bytes) -> Plan:
    """Read a plan, also one that is written at length. Raises ValueError."""
    return Plan.model_validate(plain(data))


def plain(data: bytes, process_fields: Collection[str] | None = None) -> dict[str, Any]:
    """Read a plan's file as the plain data of `Plan.to_json`.

    Args:
        data: content of the file. One that is written at length, as older releases did, is taken as it is.
        process_fields: those wanted of each process; None: all.

    Raises:
        ValueError: it is neither.
    """
    value: Json = msgspec.json.decode(data)
    if not isinstance(value, dict):
        raise ValueError("it is no plan")
    if not isinstance(value.get("nodes"), dict):
        return value
    try:
        processes = iter(unfold(value.pop("processes"), process_fields))
        nodes = unfold(value["nodes"])
        for node in nodes:
            node["processes"] = [next(processes) for _ in range(node["processes"])]
        return {**value, "nodes": nodes, "replicas": unfold(value["replicas"])}
    except (AttributeError, LookupError, RuntimeError, StopIteration, TypeError) as error:
        raise ValueError(f"its processes cannot be read ({type(error).__name__}: {error})") from error


def _lines(folded: dict[str, Json]) -> str:
    """Each template and each row on a line of its own."""
    parts = (f'"{name}": [\n' + ",\n".join(map(_line, folded[name])) + "\n]" for name in folded)
    return "{" + ", ".join(parts) + "}"


def _line(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"))

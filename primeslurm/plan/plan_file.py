"""The file format of a Plan: JSON, compressed with gzip if it is large.

Every agent reads this file. The plan of 1,024 nodes has 8,754 processes: 16 MB of JSON, 0.3 MB compressed.
"""

from __future__ import annotations

import gzip
import re
import zlib
from typing import Any

import msgspec

from primeslurm.plan.model import Plan

# Larger files are compressed. Smaller ones stay readable with `jq`.
_COMPRESSED_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_PLACEHOLDER = re.compile(r"%%|%\(([0-9]+)([+-][0-9]+)?\)")


def to_file(plan: Plan) -> bytes:
    """Return the content of a plan's file. Equal plans give equal bytes."""
    content = plan.model_dump_json(by_alias=True).encode()
    # Nodes compare digests of the file, so it must not contain a time.
    return content if len(content) <= _COMPRESSED_BYTES else gzip.compress(content, 6, mtime=0)


def from_file(content: bytes) -> Plan:
    """Read a plan's file. Raises ValueError if it holds no plan."""
    # Most processes have the same options, and each agent holds the whole plan. Sharing equal strings saves a quarter
    # of its memory (7 instead of 10 KiB per process).
    return Plan.model_validate(_with_shared_strings(plain(content), {}))


def plain(content: bytes) -> dict[str, Any]:
    """Return a plan's file as the data of `Plan.to_json`, without validating it as a Plan.

    Raises:
        ValueError: the file is damaged or holds no JSON object.
    """
    try:
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        value: Any = msgspec.json.decode(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it is not a complete gzip file: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be a plan") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a plan")
    return _unfolded(value) if isinstance(value.get("nodes"), dict) else value


def _with_shared_strings(value: Any, strings: dict[str, str]) -> Any:
    match value:
        case str():
            return strings.setdefault(value, value)
        case list():
            return [_with_shared_strings(item, strings) for item in value]
        case dict():
            return {key: _with_shared_strings(item, strings) for key, item in value.items()}
    return value


# Version 0.2.0 wrote nodes, processes and replicas as templates and rows of numbers. `%(0)` in a template stands for
# the first number of a row, `%(0+8)` for that plus 8, `%%` for a percent sign, and {"%": "%(0)"} for a bare number.


def _unfolded(value: dict[str, Any]) -> dict[str, Any]:
    try:
        processes = iter(_unfold(value.pop("processes")))
        nodes = _unfold(value["nodes"])
        for node in nodes:
            node["processes"] = [next(processes) for _ in range(node["processes"])]
        return {**value, "nodes": nodes, "replicas": _unfold(value["replicas"])}
    except (AttributeError, LookupError, RuntimeError, StopIteration, TypeError) as error:
        raise ValueError(f"its processes cannot be read ({type(error).__name__}: {error})") from error


def _unfold(folded: dict[str, Any]) -> list[dict[str, Any]]:
    return [_filled(folded["templates"][row[0]], row[1:]) for row in folded["rows"]]


def _filled(template: Any, row: list[int]) -> Any:
    match template:
        case str():
            return _PLACEHOLDER.sub(
                lambda mark: "%" if mark[0] == "%%" else str(row[int(mark[1])] + int(mark[2] or 0)), template
            )
        case {"%": number} if len(template) == 1:
            return int(_filled(number, row))
        case list():
            return [_filled(item, row) for item in template]
        case dict():
            return {_filled(key, row): _filled(item, row) for key, item in template.items()}
    return template

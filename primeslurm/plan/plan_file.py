"""How a Plan is kept in a file: each command once, and of each process a row of numbers.

A plan of a thousand nodes has eight thousand processes and three dozen commands, and every agent reads it.

Lists of like things become a few templates and a short row of numbers for each thing (`fold`). Things are alike if they
differ in numbers alone, also in numbers within texts: `decode-r0-1` and `decode-r3-7`. What they share is written once,
as a template; numbers that rise and fall together are one value of the row. In the texts of a template `%(0)` stands
for the row's first value, `%(0+8)` for that plus 8, and `%%` for a percent sign; a number that is no text is
`{"%": "%(0)"}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from primeslurm.plan.model import Plan

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
    try:
        value: Json = msgspec.json.decode(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be a plan") from error
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


Json: TypeAlias = Any
Row = list[int]
"""Index of the template, and its values."""
Numbers = tuple[int, ...]
Shape = tuple[Any, ...]
Fill = Callable[[Row], Json]

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,14})(?![0-9])")
"""In a text: only what is written in the same way when it is written again."""
_MARK = re.compile(r"%%|%\(([0-9]+)([+-][0-9]+)?\)")
_LARGEST = 2**53
_HOLE = "%"


def fold(things: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """Fold things; `unfold` gives them back, in the same order.

    Returns:
        `templates`, and `rows`, one for each thing.
    """
    found: dict[Shape, tuple[int, list[tuple[int, Numbers]]]] = {}
    for place, thing in enumerate(things):
        numbers: list[int] = []
        shape = _shape(thing, numbers)
        found.setdefault(shape, (len(found), []))[1].append((place, tuple(numbers)))
    templates: list[Json] = []
    rows: list[Row] = [[] for _ in things]
    for shape, (index, members) in found.items():
        words, columns = _values([numbers for _, numbers in members])
        templates.append(_template(shape, iter(words)))
        for member, (place, _) in enumerate(members):
            rows[place] = [index, *(column[member] for column in columns)]
    return {"templates": templates, "rows": rows}


def unfold(folded: dict[str, Json], fields: Collection[str] | None = None) -> list[dict[str, Json]]:
    """Give back what was folded. Parts that all things of a template share are one and the same object.

    Args:
        folded: what `fold` returned.
        fields: those wanted of each thing; None: all.
    """
    fills = []
    for template in folded["templates"]:
        wanted = template if fields is None else {name: part for name, part in template.items() if name in fields}
        fills.append(_compiled(wanted))
    return [fills[row[0]](row) for row in folded["rows"]]


# folding


def _shape(thing: Json, numbers: list[int]) -> Shape:
    """What is left of a thing without its numbers, which are added to `numbers` in order."""
    match thing:
        case str():
            shape, found = _text_shape(thing)
            numbers += found
            return shape
        case bool() | float() | None:
            return ("constant", json.dumps(thing))
        case int():
            if abs(thing) > _LARGEST:
                return ("constant", json.dumps(thing))
            numbers.append(thing)
            return ("number",)
        case list():
            return ("list", *(_shape(item, numbers) for item in thing))
        case _:
            return ("dict", *((_shape(key, numbers), _shape(value, numbers)) for key, value in thing.items()))


@lru_cache(maxsize=65536)
def _text_shape(text: str) -> tuple[Shape, Numbers]:
    pieces = _NUMBER.split(text)
    return ("text", *pieces[::2]), tuple(map(int, pieces[1::2]))


def _values(members: Sequence[Numbers]) -> tuple[list[str | int], list[Numbers]]:
    """For each number of a shape: itself if all members share it, else the word for it; and the values of rows."""
    words: list[str | int] = []
    columns: list[Numbers] = []
    known: dict[Numbers, int] = {}
    for column in zip(*members, strict=True):
        first = column[0]
        steps = tuple(number - first for number in column)
        if not any(steps):
            words.append(first)
            continue
        if steps not in known:
            known[steps] = len(columns)
            columns.append(column)
        index = known[steps]
        ahead = first - columns[index][0]
        words.append(f"%({index}{ahead:+d})" if ahead else f"%({index})")
    return words, columns


def _template(shape: Shape, words: Iterator[str | int]) -> Json:
    kind, *parts = shape
    if kind == "constant":
        return json.loads(parts[0])
    if kind == "number":
        word = next(words)
        return word if isinstance(word, int) else {_HOLE: word}
    if kind == "text":
        literal = [part.replace("%", "%%") for part in parts]
        return literal[0] + "".join(f"{next(words)}{part}" for part in literal[1:])
    if kind == "list":
        return [_template(part, words) for part in parts]
    return {_template(key, words): _template(value, words) for key, value in parts}


# unfolding


def _compiled(template: Json) -> Fill:
    """A function from a row to the thing."""
    fill = _fill(template)
    return fill if callable(fill) else lambda row: fill


def _fill(template: Json) -> Fill | Json:
    """A function from a row to the thing, or, where rows change nothing, the thing itself."""
    match template:
        case str():
            return _fill_text(template)
        case {"%": word} if len(template) == 1:
            return _fill_number(word)
        case list():
            items = [_fill(item) for item in template]
            if not any(map(callable, items)):
                return items
            return lambda row: [item(row) if callable(item) else item for item in items]
        case dict():
            pairs = [(_fill_text(key), _fill(value)) for key, value in template.items()]
            if not any(callable(key) or callable(value) for key, value in pairs):
                return dict(pairs)
            return lambda row: {
                key(row) if callable(key) else key: value(row) if callable(value) else value for key, value in pairs
            }
        case _:
            return template


def _fill_number(word: str) -> Fill:
    place, ahead = _reference(_MARK.fullmatch(word))
    return lambda row: row[place] + ahead


def _fill_text(text: str) -> Fill | str:
    pieces: list[str | tuple[int, int]] = []
    end = 0
    for mark in _MARK.finditer(text):
        pieces.append(text[end : mark.start()])
        pieces.append("%" if mark[0] == "%%" else _reference(mark))
        end = mark.end()
    pieces.append(text[end:])
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(map(str, pieces))
    return lambda row: "".join([p if isinstance(p, str) else str(row[p[0]] + p[1]) for p in pieces])


def _reference(mark: re.Match[str] | None) -> tuple[int, int]:
    """Place in the row, and what is added to the value there. Raises ValueError for what is no mark."""
    if mark is None or mark[1] is None:
        raise ValueError("a template refers to a value in words that are not known")
    return int(mark[1]) + 1, int(mark[2] or 0)

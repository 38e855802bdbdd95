"""Slurm host lists: expand `node[001-003,007],x1` into names, and compress names into a host list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

# A comma outside brackets. Slurm allows blanks beside it.
_COMMA = re.compile(r",(?![^\[\]]*\])")
_PART = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")
_NUMBERED = re.compile(r"^(.*?)(\d+)$")


def expand(hostlist: str) -> list[str]:
    """Return the names of a host list, in order. Raise ValueError if the text is not a host list."""
    entries = _COMMA.split(hostlist) if hostlist.strip() else []
    return [name for entry in entries for name in _expand_entry(entry.strip(), hostlist)]


def _expand_entry(entry: str, hostlist: str) -> list[str]:
    names, position = [""], 0
    while position < len(entry):
        match = _PART.match(entry, position)
        if match is None or match.end() == position:
            raise ValueError(f"not a Slurm host list: {hostlist!r}")
        text, ranges = match.groups()
        suffixes = [""] if ranges is None else _expand_ranges(ranges, hostlist)
        names = [name + text + suffix for name in names for suffix in suffixes]
        position = match.end()
    if names == [""]:
        raise ValueError(f"not a Slurm host list, an entry is empty: {hostlist!r}")
    return names


def _expand_ranges(ranges: str, hostlist: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        match = _RANGE.match(part)
        if match is None:
            raise ValueError(f"not a Slurm host list, bad range {part!r}: {hostlist!r}")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ValueError(f"not a Slurm host list, range {part!r} runs backwards: {hostlist!r}")
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return numbers


def compress(names: Iterable[str]) -> str:
    """Return a host list of names. It keeps their order, so only consecutive numbers share a range."""
    entries = []
    for (prefix, width), group in groupby(map(_split_number, names), key=lambda part: (part[0], len(part[1]))):
        numbers = [number for _, number in group]
        ranges = _ranges([int(number) for number in numbers], width) if width else []
        if not width:
            entries += [prefix] * len(numbers)
        elif len(numbers) == 1:
            entries.append(prefix + numbers[0])
        else:
            entries.append(f"{prefix}[{','.join(ranges)}]")
    return ",".join(entries)


def _split_number(name: str) -> tuple[str, str]:
    match = _NUMBERED.match(name)
    return (match[1], match[2]) if match else (name, "")


def _ranges(numbers: Sequence[int], width: int) -> list[str]:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return [f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high:0{width}d}" for low, high in ranges]

"""Slurm host lists: `node[001-003,007],x1` to names and back. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

_PART = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")
_NUMBERED = re.compile(r"^(.*?)(\d+)$")


def expand(hostlist: str) -> list[str]:
    """Expand a host list into names, in order. Brackets may stand anywhere in a name, more than once.

    Raises:
        ValueError: the text is not a host list.
    """
    return [name for entry in _split(hostlist) for name in _expand_entry(entry, hostlist)]


def _split(hostlist: str) -> list[str]:
    """Cut at the commas outside brackets. As in Slurm, blanks may stand beside them."""
    entries, depth, current = [], 0, ""
    for character in hostlist:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            entries.append(current)
            current = ""
        else:
            current += character
    return [entry.strip() for entry in ([*entries, current] if current.strip() or entries else [])]


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
    """The host list of names. Order is kept, so only neighbours that count upwards share a bracket."""
    entries = []
    for (prefix, width), group in groupby(map(_numbered, names), key=lambda part: (part[0], len(part[1]))):
        numbers = [number for _, number in group]
        ranges = _ranges([int(number) for number in numbers], width) if width else []
        if not width:
            entries += [prefix] * len(numbers)
        elif len(numbers) == 1:
            entries.append(prefix + numbers[0])
        else:
            entries.append(f"{prefix}[{','.join(ranges)}]")
    return ",".join(entries)


def _numbered(name: str) -> tuple[str, str]:
    """A name as its prefix and the digits at its end ("" if there are none)."""
    match = _NUMBERED.match(name)
    return (match[1], match[2]) if match else (name, "")


def _ranges(numbers: Sequence[int], width: int) -> list[str]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return [f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high:0{width}d}" for low, high in found]

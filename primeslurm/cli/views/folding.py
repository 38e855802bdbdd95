"""Texts that differ in numbers alone, told as one: `trainer-rank-0`, `trainer-rank-1`, ... as `trainer-rank-0..7`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MAX_RANGES = 4
"""Of one number; where there are more, the first and the last are told, and how many there are."""
_NUMBER = re.compile(r"\d+")


def pattern(text: str) -> str:
    """Find what texts have in common that are told as one."""
    return _NUMBER.sub("#", text)


def fold(texts: Iterable[str]) -> list[str]:
    """Tell texts of one pattern as one each, in order of the first of them."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(pattern(text), []).append(text)
    return [_fold_alike(found) for found in alike.values()]


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges, for example `0..3, 7`."""
    ordered = sorted(set(numbers))
    starts = [n for i, n in enumerate(ordered) if i == 0 or ordered[i - 1] != n - 1]
    ends = [n for i, n in enumerate(ordered) if i == len(ordered) - 1 or ordered[i + 1] != n + 1]
    if len(starts) > MAX_RANGES:
        return f"{ordered[0]}..{ordered[-1]} ({len(ordered)})"
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in zip(starts, ends, strict=True))


def _fold_alike(texts: Sequence[str]) -> str:
    places = [{int(number) for number in column} for column in zip(*map(_NUMBER.findall, texts), strict=True)]
    found = iter(places)

    def told(match: re.Match[str]) -> str:
        numbers = next(found)
        if len(numbers) == 1:
            return match[0]
        text = ranges(numbers)
        return f"[{text}]" if "," in text or " " in text else text

    return _NUMBER.sub(told, texts[0])

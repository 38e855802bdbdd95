"""Fold texts that differ only in numbers: `trainer-rank-0`, `trainer-rank-1`, ... become `trainer-rank-0..7`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Longest list of ranges. A longer one is written as its first number, its last number and its length.
MAX_RANGES = 4
_NUMBER = re.compile(r"\d+")


def pattern(text: str) -> str:
    """Return the text without its numbers. Texts with the same pattern can be folded."""
    return _NUMBER.sub("#", text)


def fold(texts: Iterable[str]) -> list[str]:
    """Fold the texts of each pattern into one text, in order of first occurrence."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(pattern(text), []).append(text)
    return [_fold_alike(group) for group in alike.values()]


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, for example `0..3, 7`."""
    ordered = sorted(set(numbers))
    starts = [n for i, n in enumerate(ordered) if i == 0 or ordered[i - 1] != n - 1]
    ends = [n for i, n in enumerate(ordered) if i == len(ordered) - 1 or ordered[i + 1] != n + 1]
    if len(starts) > MAX_RANGES:
        return f"{ordered[0]}..{ordered[-1]} ({len(ordered)})"
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in zip(starts, ends, strict=True))


def _fold_alike(texts: Sequence[str]) -> str:
    places = [{int(number) for number in column} for column in zip(*map(_NUMBER.findall, texts), strict=True)]
    columns = iter(places)

    def replacement(match: re.Match[str]) -> str:
        numbers = next(columns)
        if len(numbers) == 1:
            return match[0]
        text = ranges(numbers)
        return f"[{text}]" if "," in text or " " in text else text

    return _NUMBER.sub(replacement, texts[0])

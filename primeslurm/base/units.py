"""Durations, sizes and counts formatted for people. `--json` prints raw numbers instead."""

from __future__ import annotations

_SECONDS = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}
_UNITS = list(_SECONDS)


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: `2.3 s`, `45 s`, `1 min 22 s`, `1 h 56 min`, `2 d 3 h`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if round(seconds, 1) < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    smallest = "s" if round(seconds) < 3_600 else "min" if round(seconds / 60) < 24 * 60 else "h"
    rest, parts = round(seconds / _SECONDS[smallest]) * _SECONDS[smallest], []
    for unit in _UNITS[: _UNITS.index(smallest) + 1]:
        number, rest = divmod(rest, _SECONDS[unit])
        parts += [f"{number} {unit}"] if number else []
    return " ".join(parts)


def size(number_of_bytes: float) -> str:
    """Format bytes in decimal units: `8.9 TB`, `746 GB`, `512 B`."""
    value = float(number_of_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            return f"{_digits(value)} {unit}"
        value /= 1000
    return f"{_digits(value)} PB"


def gib(value: float) -> str:
    return f"{_digits(value)} GiB"


def tokens(number: float) -> str:
    """Format a number of tokens: `128`, `8.2k`, `650k`, `1.2M`."""
    value = float(number)
    for unit in ("", "k"):
        if abs(value) < 999.5:
            return f"{_digits(value)}{unit}"
        value /= 1000
    return f"{value:,.1f}".removesuffix(".0") + "M"


def number(value: float) -> str:
    return f"{value:,.0f}"


def count(number: int, word: str) -> str:
    """Format a count with its noun: `1 node`, `10,752 nodes`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _digits(value: float) -> str:
    """Format with at least two digits: 8.9, 12, 746."""
    return f"{value:.1f}".removesuffix(".0") if abs(round(value, 1)) < 10 else f"{value:.0f}"

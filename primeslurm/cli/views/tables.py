"""Consoles and tables. Separate from `output` because importing rich is slow."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from primeslurm.cli.output import plain

# Width of output that goes to no terminal: grep finds no name that is broken into two lines.
PIPE_COLUMNS = 240


class PlainConsole(Console):
    """A console without markup, on which texts cannot control the terminal: `[red]` in an error stays as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, and keep only control characters that rich itself writes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
out = PlainConsole(soft_wrap=False, width=PIPE_COLUMNS if _piped else None)
err = PlainConsole(stderr=True, soft_wrap=True)


def light_table(*columns: str, title: str | None = None, indent: int = 0) -> Table:
    """Return a table without lines, which leaves more of 80 columns to the cells.

    `indent` is the number of spaces before each cell. The space between two columns is always 2.
    """
    padding = (0, 2 - indent, 0, indent) if indent else (0, 2, 0, 0)
    table = Table(title=title, title_justify="left", box=None, padding=padding)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


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

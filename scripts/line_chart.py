"""Geometry of line charts in figures: ticks, lines and points in pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from primeslurm.records.metrics import Row

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 34
# Largest number of points of a line. More are averaged in buckets.
MAX_POINTS = 240
TICKS = 5

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: where, in pixels, and what is written beside it."""

    at: float
    label: str


@dataclass(frozen=True)
class Dot:
    """A point of a line."""

    x: float
    y: float


@dataclass(frozen=True)
class Line:
    """One series."""

    label: str
    paths: list[str]
    """`points` of polylines: more than one where values are missing."""
    dots: list[Dot]


@dataclass(frozen=True)
class Chart:
    """One chart, WIDTH x HEIGHT pixels."""

    title: str
    unit: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[Line]


def chart(title: str, unit: str, rows: Sequence[Row], series: Sequence[tuple[str, str]]) -> Chart | None:
    """Lay out a chart over steps of the metrics in `series` (label, name); None if no row has any of them.

    Args:
        title: its heading.
        unit: of the values, in words.
        rows: of metrics.jsonl, oldest first.
        series: lines of the chart, each with its label and the name of its metric.
    """
    found = [(label, _thinned(_points(rows, name))) for label, name in series]
    found = [(label, points) for label, points in found if points]
    if not found:
        return None
    values = [y for _, points in found for _, y in points]
    steps = [x for _, points in found for x, _ in points]
    low, high = min(values), max(values)
    marks = nice_marks(min(low, 0.0) if low > 0 and low < high / 2 else low, high)
    low, high = min(low, marks[0]), max(high, marks[-1])
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        return round(LEFT + (step - first) / ((last - first) or 1.0) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        share = (value - low) / ((high - low) or 1.0)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    return Chart(
        title=title,
        unit=unit,
        x_ticks=[Tick(x(step), f"{step:g}") for step in _step_marks(first, last)],
        y_ticks=[Tick(y(mark), f"{mark:.6g}") for mark in marks],
        lines=[_line(label, points, x, y) for label, points in found],
    )


def nice_marks(low: float, high: float) -> list[float]:
    """About five round values that span from low to high."""
    if low == high:
        low, high = min(low, 0.0), max(high, 0.0) or (1.0 if not low else 0.0)
    rough = (high - low) / (TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    begin, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(begin, end + 1)]


def _step_marks(first: float, last: float) -> list[float]:
    """Round whole numbers within first and last."""
    rough = max((last - first) / (2 * TICKS), 1.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [i * step for i in range(math.ceil(first / step), math.floor(last / step) + 1)]


def _points(rows: Sequence[Row], name: str) -> Points:
    points = [(float(row["step"]), float(row[name])) for row in rows if isinstance(row.get(name), int | float)]
    return [(x, y) for x, y in points if math.isfinite(y)]


def _thinned(points: Points) -> Points:
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return points
    buckets = [points[i : i + size] for i in range(0, len(points), size)]
    return [(b[len(b) // 2][0], sum(y for _, y in b) / len(b)) for b in buckets]


def _line(label: str, points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> Line:
    usual = min((b - a for (a, _), (b, _) in pairwise(points)), default=1.0)
    paths: list[list[str]] = [[]]
    for i, (step, value) in enumerate(points):
        if i and step - points[i - 1][0] > 3 * usual:
            paths.append([])
        paths[-1].append(f"{x(step)},{y(value)}")
    dots = [Dot(x(step), y(value)) for step, value in points]
    return Line(label, [" ".join(path) for path in paths], dots)

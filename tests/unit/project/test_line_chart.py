"""Where ticks and lines of a figure's chart go."""

from __future__ import annotations

import pytest

from scripts.line_chart import HEIGHT, LEFT, MAX_POINTS, RIGHT, WIDTH, chart, nice_marks


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.0, 0.97, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (-3.0, 80.0, [-25.0, 0.0, 25.0, 50.0, 75.0, 100.0]),
        (0.0, 0.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (4.0, 4.0, [0.0, 1.0, 2.0, 3.0, 4.0]),
        (-4.0, -4.0, [-4.0, -3.0, -2.0, -1.0, 0.0]),
    ],
)
def test_ticks_are_round_and_span_the_values(low: float, high: float, marks: list[float]) -> None:
    assert nice_marks(low, high) == pytest.approx(marks)


def rows(*values: float) -> list[dict[str, float]]:
    return [{"step": i, "x": value} for i, value in enumerate(values, 1)]


def test_chart_spans_its_frame() -> None:
    drawn = chart("T", "u", rows(0.0, 5.0, 10.0), [("x", "x"), ("not there", "y")])
    assert drawn is not None
    (line,) = drawn.lines
    assert [dot.x for dot in line.dots] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert line.dots[0].y > line.dots[1].y > line.dots[2].y and all(0 <= dot.y <= HEIGHT for dot in line.dots)
    assert [tick.label for tick in drawn.x_ticks] == ["1", "2", "3"]
    assert [tick.label for tick in drawn.y_ticks] == ["0", "2.5", "5", "7.5", "10"]


def test_there_is_no_chart_without_values() -> None:
    assert chart("T", "", rows(1.0), [("y", "y")]) is None
    assert chart("T", "", rows(float("nan"), float("inf")), [("x", "x")]) is None
    assert chart("T", "", [], [("x", "x")]) is None


def test_missing_steps_break_the_line_and_long_runs_are_averaged() -> None:
    gap = [*rows(1.0, 2.0), {"step": 30, "x": 3.0}, {"step": 31, "x": 3.0}]
    drawn = chart("T", "", gap, [("x", "x")])
    assert drawn is not None and len(drawn.lines[0].paths) == 2
    drawn = chart("T", "", rows(*map(float, range(10_000))), [("x", "x")])
    assert drawn is not None and len(drawn.lines[0].dots) <= MAX_POINTS
    assert len(drawn.x_ticks) <= 11

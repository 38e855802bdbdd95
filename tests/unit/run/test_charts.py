"""Positions of ticks and lines in a chart."""

from __future__ import annotations

import pytest

from primeslurm.run.report.charts import HEIGHT, LEFT, MAX_POINTS, RIGHT, WIDTH, chart, nice_marks


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
    found = chart("T", "u", rows(0.0, 5.0, 10.0), [("x", "x"), ("not there", "y")])
    assert found is not None
    (line,) = found.lines
    assert [dot.x for dot in line.dots] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert line.dots[0].y > line.dots[1].y > line.dots[2].y and all(0 <= dot.y <= HEIGHT for dot in line.dots)
    assert [dot.title for dot in line.dots][1] == "x, step 2: 5"
    assert [tick.label for tick in found.x_ticks] == ["1", "2", "3"]
    assert [tick.label for tick in found.y_ticks] == ["0", "2.5", "5", "7.5", "10"]


def test_there_is_no_chart_without_values() -> None:
    assert chart("T", "", rows(1.0), [("y", "y")]) is None
    assert chart("T", "", rows(float("nan"), float("inf")), [("x", "x")]) is None
    assert chart("T", "", rows(0.0, -1.0), [("x", "x")], log=True) is None
    assert chart("T", "", [], [("x", "x")]) is None


def test_missing_steps_break_the_line_and_long_runs_are_averaged() -> None:
    gap = [*rows(1.0, 2.0), {"step": 30, "x": 3.0}, {"step": 31, "x": 3.0}]
    found = chart("T", "", gap, [("x", "x")])
    assert found is not None and len(found.lines[0].paths) == 2
    found = chart("T", "", rows(*map(float, range(10_000))), [("x", "x")])
    assert found is not None and len(found.lines[0].dots) <= MAX_POINTS and not found.lines[0].sparse
    assert len(found.x_ticks) <= 11


def test_logarithmic_chart_labels_the_values() -> None:
    found = chart("T", "", rows(1e-3, 1e-6), [("x", "x")], log=True)
    assert found is not None
    assert [tick.label for tick in found.y_ticks] == ["1e-6", "1e-5", "1e-4", "1e-3"]
    assert found.lines[0].dots[1].title == "x, step 2: 1e-06"

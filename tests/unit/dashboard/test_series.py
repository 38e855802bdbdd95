"""Metrics are read once, and long series keep their shape."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from primeslurm.base import files
from primeslurm.dashboard.charts import chart_data, specs
from primeslurm.dashboard.metric_table import MetricTable, spread
from primeslurm.dashboard.routes import LogChanges, RunChanges
from primeslurm.dashboard.run_data import RunIndex
from primeslurm.records.reading import GrowingFile
from tests.support.clock import Clock
from tests.support.recorded_runs import recorded_run, write_metrics


def test_only_new_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = GrowingFile(path)
    assert file.appended() == ([], False, True)
    path.write_bytes(b"a\nb\nc")
    assert file.appended() == ([b"a", b"b"], False, True)
    assert file.appended() == ([], False, True)
    with path.open("ab") as handle:
        handle.write(b"d\ne\n")
    assert file.appended() == ([b"cd", b"e"], False, True)
    files.write_atomic(path, b"new\n")
    assert file.appended() == ([b"new"], True, True)
    path.unlink()
    assert file.appended() == ([], True, True)


def test_a_large_file_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"".join(b"%04d\n" % i for i in range(100)) + b"x" * 50 + b"\nend\n")
    file, lines, complete = GrowingFile(path, limit=20), [], False
    while not complete:
        new, _, complete = file.appended()
        lines += new
    assert [line for line in lines if line[:1].isdigit()] == [b"%04d" % i for i in range(100)]
    assert lines[-1] == b"end" and all(len(line) <= 20 for line in lines)


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded_run(tmp_path / "r")
    table = MetricTable(run.path)
    table.refresh()
    parsed: list[bytes] = []
    import primeslurm.dashboard.metric_table as module

    real = module.parse_row
    monkeypatch.setattr(module, "parse_row", lambda line: parsed.append(line) or real(line))
    table.refresh()
    assert parsed == [] and table.trained.rows == 30
    write_metrics(run, range(31, 33), "a")
    table.refresh()
    assert [json.loads(line)["step"] for line in parsed] == [31, 32] and table.trained.rows == 32


def test_missing_values_and_damaged_rows(tmp_path: Path) -> None:
    rows = ['{"step": 1, "a": 1}', "damaged", '{"step": 2, "b": 2}', '{"step": 3, "a": 3, "c": NaN}', "[]"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    table = MetricTable(tmp_path)
    table.refresh()
    np.testing.assert_array_equal(table.trained.values("a"), [1, np.nan, 3])
    np.testing.assert_array_equal(table.trained.values("b"), [np.nan, 2, np.nan])
    assert table.rows(1) == [{"step": 2, "b": 2}, {"step": 3, "a": 3}]
    assert np.isnan(table.trained.values("none")).all()


def test_a_resumed_run_starts_its_series_again(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r")
    table = MetricTable(run.path)
    table.refresh()
    lines = (run.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    files.write_atomic(run.path / "metrics.jsonl", b"".join(lines[:10]))
    table.refresh()
    assert (table.trained.rows, table.generation) == (10, 1)


def test_spikes_survive_and_the_number_of_points_is_bounded() -> None:
    steps = 5000
    values = np.sin(np.arange(steps) / 50)
    values[1234], values[4321] = 50.0, -50.0
    other = np.where(np.arange(steps) % 7 == 0, 1.0, np.nan)
    chosen = spread(steps, [values, other], 600)
    assert len(chosen) <= 602 and list(chosen) == sorted(set(chosen))
    assert {0, 1234, 4321, steps - 1} <= set(chosen)
    assert list(spread(5, [values[:5]], 600)) == [0, 1, 2, 3, 4]
    assert len(spread(steps, [np.full(steps, np.nan)], 600)) <= 602
    assert len(spread(601, [values[:601]], 600)) <= 602


def test_a_long_run_has_short_curves(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", 0)
    write_metrics(run, range(1, 5001))
    table = MetricTable(run.path)
    table.refresh()
    charts = chart_data(table, specs(table.trained.metrics, table.evaluated.metrics))
    assert all(len(chart["steps"]) <= 602 for chart in charts)
    assert all(len(values) == len(chart["steps"]) for chart in charts for values in chart["values"])
    assert charts[0]["steps"][0] == 1 and charts[0]["steps"][-1] == 5000


def test_a_browser_gets_new_rows_once(runs: Path, index: RunIndex, clock: Clock) -> None:
    run = index.run("r")
    changes = RunChanges(run, 30, 0)
    assert [name for name, _ in changes.look()] == ["status"]
    write_metrics(run.run, range(31, 33), "a")
    clock.now += 10
    found = dict(changes.look())
    assert found["rows"]["begin"] == 30 and [row["step"] for row in found["rows"]["rows"]] == [31, 32]
    assert list(changes.look()) == []
    write_metrics(run.run, range(1, 6))
    clock.now += 10
    assert "reset" in dict(changes.look())
    assert not changes.active


def test_a_browser_without_curves_gets_no_rows(runs: Path, index: RunIndex, clock: Clock) -> None:
    run = index.run("r")
    changes = RunChanges(run, None, 0)
    list(changes.look())
    write_metrics(run.run, range(31, 33), "a")
    clock.now += 10
    assert set(dict(changes.look())) == {"status"}


def test_a_log_is_followed(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("one\n")
    changes = LogChanges(log, 4)
    assert list(changes.look()) == []
    with log.open("a") as file:
        file.write("two\nthr")
    assert [page["lines"] for _, page in changes.look()] == [["two"]]
    with log.open("a") as file:
        file.write("ee\n")
    assert [page["lines"] for _, page in changes.look()] == [["three"]]
    log.write_text("new\n")
    assert [page["lines"] for _, page in changes.look()] == [["new"]]

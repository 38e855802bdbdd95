"""Metrics of a run as columns, kept current by reading only new rows of metrics.jsonl."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection
from math import isnan, nan
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primeslurm.records.metrics import FILE, Row, is_evaluation, parse_row, with_rl_names
from primeslurm.records.reading import GrowingFile

Values = NDArray[np.float64]
_NOT_METRICS = ("step", "time")


class Columns:
    """Rows as one array per metric. A missing value is NaN."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, row: Row) -> None:
        for name, value in row.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d")
            if len(column) < self.rows:
                column.extend([nan] * (self.rows - len(column)))
            column.append(value)
        self.rows += 1

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics, without step and time."""
        return [name for name in self._columns if name not in _NOT_METRICS]

    def values(self, name: str) -> Values:
        """Return a copy of a column, one value per row; all NaN for an unknown metric."""
        result = np.full(self.rows, nan)
        column = self._columns.get(name)
        if column is not None:
            result[: len(column)] = column
        return result

    def row(self, index: int, names: Collection[str] | None = None) -> Row:
        """Return the values of a row, of these columns or of all. A metric that was NaN or missing is left out."""
        columns = self._columns.items() if names is None else ((n, self._columns.get(n, ())) for n in names)
        return {name: column[index] for name, column in columns if index < len(column) and not isnan(column[index])}


class MetricTable:
    """Training and evaluation metrics of a run.

    Readers hold `lock` while they use `trained` and `evaluated`.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = GrowingFile(run_dir / FILE)
        self.lock = threading.RLock()
        self.trained = Columns()
        self.evaluated = Columns()  # rows of evaluations, in the order in which they ended
        self.generation = 0
        """Counts how often the file was replaced, which happens when a run resumes from an earlier step."""

    def refresh(self) -> None:
        """Read the rows that were appended since the last call. Raises OSError."""
        with self.lock:
            complete = False
            while not complete:
                lines, replaced, complete = self._file.appended()
                if replaced:
                    self.trained, self.evaluated = Columns(), Columns()
                    self.generation += 1
                for line in lines:
                    self._add(parse_row(line))

    def _add(self, row: Row | None) -> None:
        if row is None:
            return
        if is_evaluation(row):
            self.evaluated.add(row)
        else:
            self.trained.add(with_rl_names(row))

    def rows(self, begin: int, names: Collection[str] | None = None) -> list[Row]:
        """Return the trained rows from an index on, with these columns or with all."""
        with self.lock:
            return [self.trained.row(i, names) for i in range(begin, self.trained.rows)]


def spread(rows: int, columns: list[Values], points: int) -> NDArray[np.intp]:
    """Choose about `points` rows that show the shape of all columns [rows], and return their indices in order.

    Rows are divided into buckets of equal size. In each bucket, the rows with the smallest and the largest value of
    each column are chosen, so that spikes stay visible. NaN is a missing value.
    """
    if rows <= points:
        return np.arange(rows)
    buckets = max(1, points // (2 * max(1, len(columns))))
    size = -(-rows // buckets)
    buckets = -(-rows // size)
    starts = np.arange(buckets) * size
    chosen = [np.array([0, rows - 1])]
    choices: tuple[tuple[Callable[..., NDArray[np.intp]], float], ...] = ((np.argmin, np.inf), (np.argmax, -np.inf))
    for column in columns:
        padded = np.full(buckets * size, np.nan)
        padded[:rows] = column
        for choose, neutral in choices:
            best = choose(np.where(np.isfinite(padded), padded, neutral).reshape(buckets, size), axis=1)
            chosen.append(starts + best)
    return np.unique(np.minimum(np.concatenate(chosen), rows - 1))

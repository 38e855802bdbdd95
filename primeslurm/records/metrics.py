"""Metrics per step: metrics.jsonl, and the monitors of the recipe (`records.monitors`).

The orchestrator of an RL run or the trainer of an SFT run writes them. Names in RL rows start with the component
(`trainer/loss`, `reward/mean`). SFT rows come from the trainer alone and have no such prefix (`loss`). Readers get the
RL names for both.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.files import Appender, write_atomic
from primeslurm.records.monitors import (
    EVALUATION,
    MetricsMonitor,
    MlflowMonitor,
    SampleRow,
    TensorBoard,
    WeightsAndBiases,
)
from primeslurm.records.reading import TAIL_BYTES, last_lines, whole_lines

# Prefix of metrics of the whole run, which SFT writes, too.
_OF_RUN = "throughput/"
# In the run directory.
FILE = "metrics.jsonl"

# A row of metrics.jsonl: `step`, `time` (Unix seconds), and metrics by name, those of environments included.
Row = dict[str, float]
# Whole numbers beyond these bounds are damage: the first ones do not fit into a float.
_LARGEST, _LAST_STEP = 1 << 1023, 1 << 62


class MetricsLog:
    """Writes one row per step, and one per evaluation.

    Args:
        run_dir: the run; rows of steps after `resumed_step` come from an abandoned attempt and are removed.
        resumed_step: the last step that is part of the resumed checkpoint.
        tensorboard: also write TensorBoard event files to the run directory.
        wandb: arguments of `wandb.init` besides id and directory; None disables Weights & Biases.
        mlflow: options of `monitors.MlflowMonitor`; None disables MLflow.

    Raises:
        PrimeslurmError: the package of a monitor is missing.
    """

    def __init__(
        self,
        run_dir: Path,
        resumed_step: int,
        *,
        tensorboard: bool,
        wandb: Mapping[str, Any] | None = None,
        mlflow: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = run_dir / FILE
        self._last, self._evaluated = _truncate(self._path, resumed_step)
        self._appender = Appender(self._path)
        self._unwritten = b""
        self._lock = threading.Lock()
        self._monitors: list[MetricsMonitor] = (
            [TensorBoard(run_dir / "tensorboard", resumed_step)] if tensorboard else []
        )
        if wandb is not None:
            self._monitors.append(WeightsAndBiases(run_dir, wandb))
        if mlflow is not None:
            self._monitors.append(MlflowMonitor(run_dir, mlflow))

    def write(self, step: int, row: Mapping[str, float], samples: Sequence[SampleRow] = ()) -> None:
        """Add the row of a step, unless it has one, and show some of its rollouts.

        Raises OSError if the next row or `flush` must write the row.
        """
        if step <= self._last:
            return
        self._last = step
        now = time.time()
        try:
            self._append(step, now, row)
        finally:
            for monitor in self._monitors:
                if samples:
                    monitor.log_samples(step, samples)
                monitor.log(step, now, row)

    def add_evaluation(self, step: int, row: Mapping[str, float]) -> None:
        """Add the results of a step's evaluation as a row. Raises OSError like `write`."""
        if step in self._evaluated:
            return
        self._evaluated.add(step)
        now = time.time()
        try:
            self._append(step, now, row)
        finally:
            for monitor in self._monitors:
                monitor.log_evaluation(step, now, row)

    def _append(self, step: int, now: float, row: Mapping[str, float]) -> None:
        self._unwritten += (json.dumps({"step": step, "time": now, **row}) + "\n").encode()
        self.flush()

    def flush(self) -> None:
        with self._lock:
            if self._unwritten:
                self._appender.append(self._unwritten)
                self._unwritten = b""

    def sync(self) -> None:
        self.flush()
        with self._lock:
            durable.sync_if_there(self._path)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.flush()
        for monitor in self._monitors:
            monitor.close()


def sync(run_dir: Path) -> None:
    """Flush all rows to disk: a checkpoint is only valid with the rows of its steps. Raises OSError."""
    durable.sync_if_there(run_dir / FILE)


def with_rl_names(row: Row) -> Row:
    """Return a row with the names of RL runs. The time of an SFT step is the sum of the trainer's phases."""
    if "loss" not in row:
        return row
    common = {name: row[name] for name in ("step", "time") if name in row}
    trainer = {name if name.startswith(_OF_RUN) else f"trainer/{name}": row[name] for name in row if name not in common}
    phases = [value for name, value in row.items() if name.startswith("seconds/")]
    return common | trainer | ({"throughput/step_seconds": sum(phases)} if phases else {})


def parse_row(line: bytes) -> Row | None:
    """Return the numbers of one line of metrics.jsonl; None if the line is damaged."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        try:
            value = json.loads(line)  # slower, but it reads NaN, which a metric may be, and lone surrogates
            value = {name.encode(errors="replace").decode(): number for name, number in value.items()}
        except (AttributeError, ValueError, RecursionError):
            return None
    if not isinstance(value, dict) or type(step := value.get("step")) is not int or abs(step) > _LAST_STEP:
        return None
    return {name: number for name, number in value.items() if _is_number(number)}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)


def is_evaluation(row: Row) -> bool:
    """Return whether a row holds evaluation metrics. It holds nothing else then."""
    return f"\n{EVALUATION}" in "\n" + "\n".join(row)  # ten times as fast as a loop over the names


def rows(path: Path) -> list[Row]:
    """Read one row per trained step, in order, under the names of RL. Evaluations are merged into their step."""
    return _merged(whole_lines(path))


def recent_rows(path: Path, size: int = TAIL_BYTES) -> list[Row]:
    """Read the rows in the last `size` bytes of the file; none if the file is missing."""
    return _merged(last_lines(path, size))


def _merged(lines: list[bytes]) -> list[Row]:
    trained, evaluated = [], {}
    for row in filter(None, map(parse_row, lines)):
        if is_evaluation(row):
            evaluated[row["step"]] = row
        else:
            trained.append(with_rl_names(row))
    # An evaluation of step 0 has no trained step to merge with.
    return [{**evaluated.get(row["step"], {}), **row} for row in trained]


def _truncate(path: Path, step: int) -> tuple[int, set[int]]:
    """Remove the rows of later steps. Return the last trained step in the file, and the evaluated steps."""
    if not files.exists(path):
        return 0, set()
    rows = []
    for line in files.read_bytes(path).splitlines():
        row = parse_row(line)  # None: the writer was killed in the middle of its last line
        if row is not None and row["step"] <= step:
            rows.append((row, line))
    write_atomic(path, b"".join(line + b"\n" for _, line in rows))
    trained = max((row["step"] for row, _ in rows if not is_evaluation(row)), default=0)
    return int(trained), {int(row["step"]) for row, _ in rows if is_evaluation(row)}

"""Metrics of each step: metrics.jsonl, TensorBoard, and Weights & Biases when configured.

The orchestrator of an RL run and the trainer of an SFT run write them. Rows of RL name who measured (`trainer/loss`,
`reward/mean`); rows of SFT are the trainer's alone and go without (`loss`). Readers get both under the same names.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primeslurm.base import durable, files
from primeslurm.base.files import Appender, write_atomic
from primeslurm.records.attempt import LockRecord
from primeslurm.records.reading import find_record, last_lines, whole_lines

log = logging.getLogger(__name__)
EVALUATION = "eval/"
"""Prefix of what evaluations measured: it comes when they are done, as a row of its own of the step evaluated."""

FILE = "metrics.jsonl"
"""In the run directory."""

Row = dict[str, float]
"""A row of metrics.jsonl: `step`, `time` (Unix seconds), and metrics by name, the environment's own among them."""


class MetricsLog:
    """One row per step.

    Args:
        run_dir: of the run; rows of steps after `resumed_step` were written by an abandoned attempt and are removed.
        resumed_step: the last step that counts as trained.
        tensorboard: write TensorBoard's event files, too.
        wandb: what `wandb.init` is told of the run besides its id and place; None for no Weights & Biases.
    """

    def __init__(
        self, run_dir: Path, resumed_step: int, *, tensorboard: bool, wandb: Mapping[str, Any] | None = None
    ) -> None:
        self._path = run_dir / FILE
        self._last, self._evaluated = _truncate(self._path, resumed_step)
        self._appender = Appender(self._path)
        self._unwritten = b""
        self._lock = threading.Lock()
        self._board = _Board(run_dir / "tensorboard", resumed_step) if tensorboard else None
        self._wandb = _wandb(run_dir, wandb) if wandb is not None else None

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Add the row of a step; a step that has one is ignored.

        Raises:
            OSError: it is not in the file yet; it is written with the next row, or by `flush`.
        """
        if step <= self._last:
            return
        self._last = step
        self._append(step, row)
        if self._wandb is not None:
            self._wandb.log(dict(row), step=step)

    def add_evaluation(self, step: int, row: Mapping[str, float]) -> None:
        """Add what an evaluation of a step measured, as a row of its own; a second one is ignored.

        Later steps may have their rows by then, so W&B gets it with the step that is being trained, and
        `eval/step` as what to plot it over.

        Raises:
            OSError: as `write`.
        """
        if step in self._evaluated:
            return
        self._evaluated.add(step)
        self._append(step, row)
        if self._wandb is not None:
            self._wandb.log({**row, f"{EVALUATION}step": step}, commit=False)

    def _append(self, step: int, row: Mapping[str, float]) -> None:
        now = time.time()
        self._unwritten += (json.dumps({"step": step, "time": now, **row}) + "\n").encode()
        try:
            self.flush()
        finally:
            if self._board is not None:
                self._board.write(step, now, row)

    def flush(self) -> None:
        """Write rows that the file system has not taken yet. Raises OSError."""
        with self._lock:
            if self._unwritten:
                self._appender.append(self._unwritten)
                self._unwritten = b""

    def sync(self) -> None:
        """Have all rows so far on disk. Raises OSError."""
        self.flush()
        with self._lock:
            durable.sync_if_there(self._path)

    def close(self) -> None:
        """Write what is left, and close."""
        with contextlib.suppress(OSError):
            self.flush()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def sync(run_dir: Path) -> None:
    """Have all rows so far on disk: a checkpoint counts only with the rows of its steps. Raises OSError."""
    durable.sync_if_there(run_dir / FILE)


def by_one_name(row: Row) -> Row:
    """Return a row as it was written, with the trainer's own metrics named as in RL, whatever the task.

    What an RL run measures as `throughput/step_seconds` is, for SFT, the sum of the trainer's phases.
    """
    if "loss" not in row:
        return row
    kept = {name: row[name] for name in ("step", "time") if name in row}
    own = {f"trainer/{name}": value for name, value in row.items() if name not in kept}
    phases = [value for name, value in row.items() if name.startswith("seconds/")]
    return kept | own | ({"throughput/step_seconds": sum(phases)} if phases else {})


def row_of(line: bytes) -> Row | None:
    """Read one line of a metrics.jsonl: what in it is a number. None if it is damaged."""
    try:
        value = json.loads(line)  # and not msgspec: a metric may be NaN
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return None
    return {name: number for name, number in value.items() if isinstance(number, int | float)}


def of_evaluation(row: Row) -> bool:
    """Tell whether a row holds what an evaluation measured, and nothing of training."""
    return any(name.startswith(EVALUATION) for name in row)


def rows(path: Path) -> list[Row]:
    """Read the rows of a metrics.jsonl, one per step, in order; those of SFT under the names of RL.

    What evaluations measured is with the step that they evaluated.
    """
    return _rows(whole_lines(path))


def recent_rows(path: Path) -> list[Row]:
    """Read the last complete rows, as many as fit into 256 KiB; none if there is no such file."""
    return _rows(last_lines(path))


def _rows(lines: list[bytes]) -> list[Row]:
    found, evaluated = [], {}
    for row in filter(None, map(row_of, lines)):
        if of_evaluation(row):
            evaluated[row["step"]] = row
        else:
            found.append(by_one_name(row))
    # The model before the first step has been evaluated, but no step made it.
    return [{**evaluated.get(row["step"], {}), **row} for row in found]


def _truncate(path: Path, step: int) -> tuple[int, set[int]]:
    """Forget the rows of later steps, and what is left of a row whose writer was killed.

    Returns:
        The last step that has a row of training, and the steps that have one of evaluation.
    """
    if not files.exists(path):
        return 0, set()
    kept = []
    for line in files.read_bytes(path).splitlines():
        row = row_of(line)  # None: the writer was killed in the middle of its last line
        if row is not None and row["step"] <= step:
            kept.append((row, line))
    write_atomic(path, b"".join(line + b"\n" for _, line in kept))
    trained = max((row["step"] for row, _ in kept if not of_evaluation(row)), default=0)
    return int(trained), {int(row["step"]) for row, _ in kept if of_evaluation(row)}


class _Board:
    """TensorBoard's event files, without torch. What it shows of steps after `resumed_step` is forgotten.

    A file that cannot be written costs what it would have shown, never the run: a new file is begun.
    """

    def __init__(self, directory: Path, resumed_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # 0.3 s, and not in the base install

        self._directory = directory
        self._writer: Any = None
        begin = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=resumed_step + 1, session_log=begin))

    def write(self, step: int, now: float, row: Mapping[str, float]) -> None:
        """Add the row of a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in row.items()])
        self._add(Event(wall_time=now, step=step, summary=summary))

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        try:
            if self._writer is None:
                self._writer = files.retrying(self._directory, lambda: EventFileWriter(str(self._directory)))
            self._writer.add_event(event)
            self._writer.flush()
        except OSError as error:
            log.warning("TensorBoard's file cannot be written, a new one is begun: %s", error)
            self._writer = None  # its thread has ended

    def close(self) -> None:
        """Write what is left."""
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()


def _wandb(run_dir: Path, options: Mapping[str, Any]) -> Any:
    """The W&B run of this run, whose id it has: every attempt goes on in it, and another run of this name has its own.

    Of steps that an attempt trains anew, W&B keeps what it was told first.
    """
    import wandb

    lock = find_record(run_dir / "lock.json", LockRecord) or LockRecord()
    found = wandb.init(**options, id=lock.run_id or run_dir.name, resume="allow", dir=run_dir)
    found.define_metric(f"{EVALUATION}*", step_metric=f"{EVALUATION}step")
    return found

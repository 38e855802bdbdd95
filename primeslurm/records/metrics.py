"""Metrics per step: metrics.jsonl, TensorBoard, and Weights & Biases if configured.

The orchestrator of an RL run or the trainer of an SFT run writes them. Names in RL rows start with the component
(`trainer/loss`, `reward/mean`). SFT rows come from the trainer alone and have no such prefix (`loss`). Readers get the
RL names for both.
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

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.files import Appender, write_atomic
from primeslurm.records.attempt import LockRecord
from primeslurm.records.reading import TAIL_BYTES, find_record, last_lines, whole_lines

log = logging.getLogger(__name__)
# Prefix of evaluation metrics. An evaluation ends later than its step, so it gets a row of its own.
EVALUATION = "eval/"

# In the run directory.
FILE = "metrics.jsonl"

# A row of metrics.jsonl: `step`, `time` (Unix seconds), and metrics by name, those of environments included.
Row = dict[str, float]
_NUMBERS = (int, float)


class MetricsLog:
    """Writes one row per step, and one per evaluation.

    Args:
        run_dir: the run; rows of steps after `resumed_step` come from an abandoned attempt and are removed.
        resumed_step: the last step that is part of the resumed checkpoint.
        tensorboard: also write TensorBoard event files to the run directory.
        wandb: arguments of `wandb.init` besides id and directory; None disables Weights & Biases.
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
        """Add the row of a step, unless it has one. Raises OSError if the next row or `flush` must write it."""
        if step <= self._last:
            return
        self._last = step
        self._append(step, row)
        if self._wandb is not None:
            self._wandb.log(dict(row), step=step)

    def add_evaluation(self, step: int, row: Mapping[str, float]) -> None:
        """Add the results of a step's evaluation as a row. Raises OSError like `write`."""
        if step in self._evaluated:
            return
        self._evaluated.add(step)
        self._append(step, row)
        if self._wandb is not None:
            # W&B refuses rows of earlier steps, and later steps may have been logged already. The row therefore goes
            # to the current step, and W&B plots it over `eval/step`.
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
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def sync(run_dir: Path) -> None:
    """Flush all rows to disk: a checkpoint is only valid with the rows of its steps. Raises OSError."""
    durable.sync_if_there(run_dir / FILE)


def with_rl_names(row: Row) -> Row:
    """Return a row with the names of RL runs. The time of an SFT step is the sum of the trainer's phases."""
    if "loss" not in row:
        return row
    common = {name: row[name] for name in ("step", "time") if name in row}
    trainer = {f"trainer/{name}": value for name, value in row.items() if name not in common}
    phases = [value for name, value in row.items() if name.startswith("seconds/")]
    return common | trainer | ({"throughput/step_seconds": sum(phases)} if phases else {})


def parse_row(line: bytes) -> Row | None:
    """Return the numbers of one line of metrics.jsonl; None if the line is damaged."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        try:
            value = json.loads(line)  # slower, but it reads NaN, which a metric may be
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return None
    return {name: number for name, number in value.items() if isinstance(number, _NUMBERS)}


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


class _Board:
    """TensorBoard event files, written without torch.

    A file that cannot be written costs its rows, never the run: the next row begins a new file.
    """

    def __init__(self, directory: Path, resumed_step: int) -> None:
        # Importing takes 0.3 s, and the base install has no TensorBoard.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._directory = directory
        self._writer: Any = None
        # A session start makes TensorBoard forget what earlier files say about later steps.
        begin = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=resumed_step + 1, session_log=begin))

    def write(self, step: int, now: float, row: Mapping[str, float]) -> None:
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
            log.warning("cannot write the TensorBoard file, beginning a new one: %s", error)
            self._writer = None  # its thread has ended

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()


def _wandb(run_dir: Path, options: Mapping[str, Any]) -> Any:
    # All attempts share one W&B run, because its id is the run's id. W&B keeps the first value of a step that a later
    # attempt trains again.
    import wandb

    lock = find_record(run_dir / "lock.json", LockRecord) or LockRecord()
    run = wandb.init(**options, id=lock.run_id or run_dir.name, resume="allow", dir=run_dir)
    run.define_metric(f"{EVALUATION}*", step_metric=f"{EVALUATION}step")
    return run

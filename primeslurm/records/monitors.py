"""Monitors: tools outside the run directory that show its metrics.

`MetricsLog` writes metrics.jsonl, which is the record of a run, and passes every row to the monitors of the recipe. A
monitor that fails costs its rows, never the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from primeslurm.base import files
from primeslurm.base.errors import PrimeslurmError
from primeslurm.records.attempt import LockRecord
from primeslurm.records.reading import find_record

log = logging.getLogger(__name__)
# Prefix of evaluation metrics. An evaluation ends later than its step, so it gets a row of its own.
EVALUATION = "eval/"
# Name of the table of rollouts.
SAMPLES = "rollouts"
# Largest number of metrics in a request to MLflow.
_BATCH = 1000
# Longest wait for MLflow at the end [s].
_CLOSE_S = 120.0
# MLflow refuses metric names with other characters.
_OTHER = re.compile(r"[^\w.\- /:]")

MLFLOW_MISSING = "monitor.mlflow: the nodes' Python has no MLflow"
MLFLOW_FIX = "install mlflow-skinny there, or remove monitor.mlflow from the recipe"

# One row of a table: values by column.
SampleRow = Mapping[str, str | float]


class MetricsMonitor(Protocol):
    """Shows the metrics of a run elsewhere. Steps ascend; a resumed run repeats the steps after its checkpoint."""

    def log(self, step: int, now: float, row: Mapping[str, float]) -> None:
        """Show the row of a step. `now`: Unix seconds."""

    def log_evaluation(self, step: int, now: float, row: Mapping[str, float]) -> None:
        """Show the results of a step's evaluation. Later steps may have been logged before."""

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Show some rollouts of a step as a table. All rows have the same columns."""

    def close(self) -> None:
        """Send the metrics that are still buffered, and end the connection."""


class TensorBoard:
    """TensorBoard event files, written without torch. It shows no tables.

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

    def log(self, step: int, now: float, row: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in row.items()])
        self._add(Event(wall_time=now, step=step, summary=summary))

    log_evaluation = log

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        pass

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


class WeightsAndBiases:
    """A W&B run, which all attempts share, because its id is the run's id.

    W&B keeps the first value of a step that a later attempt trains again.
    """

    def __init__(self, run_dir: Path, options: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(**options, id=run_id(run_dir), resume="allow", dir=run_dir)
        self._run.define_metric(f"{EVALUATION}*", step_metric=f"{EVALUATION}step")
        self._table = wandb.Table

    def log(self, step: int, now: float, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def log_evaluation(self, step: int, now: float, row: Mapping[str, float]) -> None:
        # W&B refuses rows of earlier steps, and later steps may have been logged already. The row therefore goes to the
        # current step, and W&B plots it over `eval/step`.
        self._run.log({**row, f"{EVALUATION}step": step}, commit=False)

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        columns: list[str | int] = list(samples[0])
        table = self._table(columns=columns, data=[list(sample.values()) for sample in samples])
        self._run.log({SAMPLES: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowMonitor:
    """An MLflow run, which all attempts share: it is found by a tag with the run's id.

    Requests are sent by a thread, because a slow server must not hold up the orchestrator.
    """

    TAG = "primeslurm.run_id"

    def __init__(self, run_dir: Path, options: Mapping[str, Any]) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise PrimeslurmError(f"{MLFLOW_MISSING}: {MLFLOW_FIX}") from error
        # MLflow's defaults wait up to ten minutes for a server that is down.
        for name, value in (("MAX_RETRIES", "2"), ("TIMEOUT", "20")):
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
        self._client = MlflowClient(options["tracking_uri"])
        self._identity, self._options = run_id(run_dir), options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._known_run = ""
        self._failed = 0

    def log(self, step: int, now: float, row: Mapping[str, float]) -> None:
        self._thread.submit(self._try, lambda: self._log(step, now, row))

    log_evaluation = log

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        # As `mlflow.log_table` writes it, which needs pandas.
        columns = list(samples[0])
        table = {"columns": columns, "data": [[sample[name] for name in columns] for sample in samples]}
        file = f"{SAMPLES}/step_{step:06}.json"
        self._thread.submit(self._try, lambda: self._client.log_text(self._run(), json.dumps(table), file))

    def close(self) -> None:
        ended = self._thread.submit(self._try, lambda: self._client.set_terminated(self._run()))
        with contextlib.suppress(TimeoutError):
            ended.result(_CLOSE_S)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._failed:
            log.warning("%d requests to MLflow failed; metrics.jsonl has all rows", self._failed)

    def _run(self) -> str:
        """Return the id of the MLflow run. Create it unless an earlier attempt did."""
        if self._known_run:
            return self._known_run
        name = self._options["experiment"]
        experiment = self._client.get_experiment_by_name(name)
        id_ = experiment.experiment_id if experiment else self._client.create_experiment(name)
        runs = self._client.search_runs([id_], f"tags.`{self.TAG}` = '{self._identity}'", max_results=1)
        if runs:
            run = str(runs[0].info.run_id)
            self._client.update_run(run, status="RUNNING")
        else:
            made = self._client.create_run(id_, tags={self.TAG: self._identity}, run_name=self._options["name"])
            run = str(made.info.run_id)
            self._client.log_dict(run, self._options["config"], "recipe.json")
        self._known_run = run
        return run

    def _log(self, step: int, now: float, row: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        at = int(now * 1000)
        metrics = [Metric(_OTHER.sub("_", name), float(value), at, step) for name, value in row.items()]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run(), metrics[start : start + _BATCH])

    def _try(self, request: Callable[[], object]) -> None:
        try:
            request()
        except Exception as error:  # the client raises errors of many libraries
            self._failed += 1
            if self._failed == 1:
                log.warning("MLflow: %s: %s", type(error).__name__, error)


def run_id(run_dir: Path) -> str:
    """Return the id of a run, or the name of its directory if lock.json is damaged."""
    lock = find_record(run_dir / "lock.json", LockRecord) or LockRecord()
    return lock.run_id or run_dir.name

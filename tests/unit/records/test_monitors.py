"""Monitors: MLflow by a fake client, tables of rollouts, and monitors that fail."""

from __future__ import annotations

import json
import logging
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from primeslurm.base.errors import PrimeslurmError
from primeslurm.base.files import write_json
from primeslurm.records.metrics import MetricsLog, rows
from primeslurm.records.monitors import MlflowMonitor
from tests.unit.records.test_metrics import FakeWandb, recipe

OPTIONS = {"experiment": "e", "tracking_uri": "http://mlflow:5000"}
SAMPLES = [{"reward": 0.5, "text": "<b>hello</b>"}, {"reward": 1.0, "text": "x"}]


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class FakeServer:
    """The state of a tracking server."""

    def __init__(self) -> None:
        self.experiments: list[str] = []
        self.runs: list[dict[str, Any]] = []
        self.metrics: list[Metric] = []
        self.texts: dict[str, str] = {}
        self.largest_batch = 0
        self.down = False

    def client(self, tracking_uri: str) -> FakeClient:
        assert tracking_uri == OPTIONS["tracking_uri"]
        return FakeClient(self)


class FakeClient:
    """The methods of MlflowClient that are used."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def get_experiment_by_name(self, name: str) -> Any:
        if self._server.down:
            raise ConnectionError("no route to host")
        return types.SimpleNamespace(experiment_id=name) if name in self._server.experiments else None

    def create_experiment(self, name: str) -> str:
        self._server.experiments.append(name)
        return name

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
        tag, _, value = filter_string.removeprefix("tags.").partition(" = ")
        name = tag.strip("`")
        found = [run for run in self._server.runs if run["tags"].get(name) == value.strip("'")]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=run["id"])) for run in found[:max_results]]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        run = {"id": f"m{len(self._server.runs)}", "tags": tags, "name": run_name, "status": "RUNNING"}
        self._server.runs.append(run)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run["id"]))

    def _run(self, id_: str) -> dict[str, Any]:
        return next(run for run in self._server.runs if run["id"] == id_)

    def update_run(self, id_: str, status: str) -> None:
        self._run(id_)["status"] = status

    def set_terminated(self, id_: str) -> None:
        self._run(id_)["status"] = "FINISHED"

    def log_batch(self, id_: str, metrics: list[Metric]) -> None:
        assert self._run(id_)["status"] == "RUNNING"
        self._server.largest_batch = max(self._server.largest_batch, len(metrics))
        self._server.metrics += metrics

    def log_dict(self, id_: str, values: dict[str, Any], file: str) -> None:
        self._server.texts[file] = json.dumps(values)

    def log_text(self, id_: str, text: str, file: str) -> None:
        self._server.texts[file] = text


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    package, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    package.MlflowClient, entities.Metric = server.client, Metric  # type: ignore[attr-defined]
    for name in ("MAX_RETRIES", "TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return server


def log_of(run_dir: Path, resumed: int = 0) -> MetricsLog:
    return MetricsLog(run_dir, resumed, **recipe(tensorboard=False, mlflow=OPTIONS).metrics_options())


def test_attempts_of_a_run_share_an_mlflow_run(server: FakeServer, tmp_path: Path) -> None:
    write_json(tmp_path / "lock.json", {"run_id": "test-1"})
    for resumed, steps in ((0, (1, 2)), (2, (3,))):
        log = log_of(tmp_path, resumed)
        for step in steps:
            log.write(step, {"trainer/loss": float(step)})
        log.add_evaluation(steps[-1], {"eval/words/pass@1": 0.5})
        log.close()
    assert server.experiments == ["e"]
    assert [(run["name"], run["status"]) for run in server.runs] == [("test", "FINISHED")]
    losses = [(metric.step, metric.value) for metric in server.metrics if metric.key == "trainer/loss"]
    assert losses == [(1, 1), (2, 2), (3, 3)]
    # MLflow allows no @.
    assert [m.step for m in server.metrics if m.key == "eval/words/pass_1"] == [2, 3]
    assert json.loads(server.texts["recipe.json"])["name"] == "test"


def test_many_metrics_are_sent_in_batches(server: FakeServer, tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.write(1, {f"m{i}": 0.0 for i in range(2500)})
    log.close()
    assert len(server.metrics) == 2500 and server.largest_batch == 1000


def test_rollouts_become_tables(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    both = recipe(wandb={"project": "p"}, mlflow=OPTIONS).metrics_options()
    log = MetricsLog(tmp_path, 0, **both)
    log.write(7, {"loss": 7.0}, SAMPLES)
    log.write(8, {"loss": 8.0})
    log.close()
    table = (["reward", "text"], [[0.5, "<b>hello</b>"], [1.0, "x"]])
    assert wandb.tables == [(7, *table)]
    assert json.loads(server.texts["rollouts/step_000007.json"]) == {"columns": table[0], "data": table[1]}
    assert sorted(server.texts) == ["recipe.json", "rollouts/step_000007.json"]


def test_unreachable_server_costs_no_row(server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.down = True
    log = log_of(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            log.write(step, {"trainer/loss": 1.0})
        log.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2 and "no route to host" in warnings[0] and "metrics.jsonl has all rows" in warnings[1]


def test_server_that_returns_gets_the_next_rows(server: FakeServer, tmp_path: Path) -> None:
    server.down = True
    log = log_of(tmp_path)
    log.write(1, {"trainer/loss": 1.0})
    log.sync()
    monitor = log._monitors[0]
    assert isinstance(monitor, MlflowMonitor)
    monitor._thread.submit(lambda: setattr(server, "down", False)).result()
    log.write(2, {"trainer/loss": 2.0})
    log.close()
    assert [metric.step for metric in server.metrics] == [2]


def test_missing_package_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(PrimeslurmError, match="mlflow-skinny") as raised:
        log_of(tmp_path)
    assert isinstance(raised.value, PrimeslurmError)


@pytest.mark.parametrize("uri", ["mlflow:5000", "http://", "sqlite:///x.db", ""])
def test_tracking_uri_names_a_server(uri: str) -> None:
    with pytest.raises(ValueError, match=r"tracking_uri"):
        recipe(mlflow={"experiment": "e", "tracking_uri": uri})


def test_all_bad_values_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="4 validation errors"):
        recipe(mlflow={"experiment": "", "tracking_uri": "x"}, peak_tflops=0, sample_interval=-1)

"""The metrics log: resumed runs, TensorBoard, Weights & Biases, and evaluations."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from primeslurm.base.files import write_json
from primeslurm.recipe import Recipe
from primeslurm.records.metrics import MetricsLog, Row, parse_row, rows, with_rl_names


def recipe(**monitor: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "max_steps": 5,
            "seq_len": 64,
            "model": {"path": "/m"},
            "environments": [{"id": "reverse-text"}],
            "monitor": monitor,
        }
    )


RECIPE = recipe()


def test_rows_after_the_resumed_step_are_replaced(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, **RECIPE.metrics_options())
    for step in (1, 2, 2, 3):
        log.write(step, {"loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 4, "lo')
    log = MetricsLog(tmp_path, 2, **RECIPE.metrics_options())
    log.write(2, {"loss": 20.0})
    log.write(3, {"loss": 30.0})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("loss")][-1] == 30.0
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3], "step 3 of the abandoned attempt is purged"


class FakeWandb(types.ModuleType):
    """A fake module wandb that keeps its calls."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, list[int]] = {}
        """Run id to the steps logged."""
        self.names: set[str] = set()
        self.evaluations: list[dict[str, float]] = []
        self.tables: list[tuple[int | None, list[str], list[list[Any]]]] = []
        self._current = ""

    def Table(self, columns: list[str], data: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
        return columns, data

    def init(self, *, id: str, name: str, resume: str, **_: Any) -> FakeWandb:
        assert resume == "allow"
        self.names.add(name)
        self._current = id
        self.runs.setdefault(id, [])
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("eval/*", "eval/step")

    def log(self, row: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        if "rollouts" in row:
            self.tables.append((step, *row["rollouts"]))
            return
        if step is None:
            assert not commit, "a commit would close the step that is being trained"
            self.evaluations.append(row)
            return
        assert row == {"loss": float(step)}
        self.runs[self._current].append(step)

    def finish(self) -> None:
        self._current = ""


def test_attempts_of_a_run_share_a_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    to_wandb = recipe(tensorboard=False, wandb={"project": "p"})
    for directory, run_id, resumed, steps in (
        ("a", "test-1", 0, (1, 2)),
        ("a", "test-1", 2, (3,)),
        ("b", "test-2", 0, (1,)),
    ):
        (tmp_path / directory).mkdir(exist_ok=True)
        write_json(tmp_path / directory / "lock.json", {"run_id": run_id})
        log = MetricsLog(tmp_path / directory, resumed, **to_wandb.metrics_options())
        for step in steps:
            log.write(step, {"loss": float(step)})
        log.close()
    assert fake.runs == {"test-1": [1, 2, 3], "test-2": [1]} and fake.names == {"test"}


@pytest.mark.parametrize("lock", [["run_id"], {"run_id": 7}])
def test_wandb_uses_the_runs_name_if_lock_json_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: object
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    write_json(tmp_path / "lock.json", lock)
    MetricsLog(tmp_path, 0, **recipe(tensorboard=False, wandb={"project": "p"}).metrics_options()).close()
    assert fake.runs == {tmp_path.name: []}


def test_evaluations_are_merged_into_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    options = recipe(tensorboard=False, wandb={"project": "p"}).metrics_options()
    log = MetricsLog(tmp_path, 0, **options)
    log.add_evaluation(0, {"eval/words/reward_mean": 0.1})
    for step in (1, 2, 3):
        log.write(step, {"loss": float(step)})
    for _ in range(2):
        log.add_evaluation(2, {"eval/words/reward_mean": 0.2})
    log.add_evaluation(3, {"eval/words/reward_mean": 0.3})
    assert fake.evaluations[1] == {"eval/words/reward_mean": 0.2, "eval/step": 2}
    table = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in table] == [1, 2, 3]
    assert [row.get("eval/words/reward_mean") for row in table] == [None, 0.2, 0.3]

    log = MetricsLog(tmp_path, 2, **options)
    for step in (0, 2, 3):
        log.add_evaluation(step, {"eval/words/reward_mean": 0.5})
    log.write(3, {"loss": 3.0})
    assert [row.get("eval/words/reward_mean") for row in rows(tmp_path / "metrics.jsonl")] == [None, 0.2, 0.5]


def test_sft_metrics_are_read_under_the_names_of_rl() -> None:
    row = {"step": 3, "time": 9.0, "loss": 0.5, "tokens_per_s": 7.0, "seconds/optimizer": 1.0, "seconds/publish": 0.5}
    assert with_rl_names(row) == {
        "step": 3,
        "time": 9.0,
        "trainer/loss": 0.5,
        "trainer/tokens_per_s": 7.0,
        "trainer/seconds/optimizer": 1.0,
        "trainer/seconds/publish": 0.5,
        "throughput/step_seconds": 1.5,
    }
    of_rl = {"step": 3, "time": 9.0, "trainer/loss": 0.5, "reward/mean": 1.0}
    assert with_rl_names(of_rl) == of_rl


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (b'{"step": 1, "a": 1' + b"0" * 400 + b', "b": 0.5}', {"step": 1, "b": 0.5}),
        (b'{"step": 1, "a": 1' + b"0" * 5000 + b"}", None),
        (b'{"step": 1' + b"0" * 30 + b', "a": 1}', None),
        (b'{"step": 1.5, "a": 1}', None),
        (b'{"step": 1, "a": 1e300, "b": "2", "c": null, "d": [3]}', {"step": 1, "a": 1e300}),
        (b'{"step": 1, "\\ud800/reward": 0.5}', {"step": 1, "?/reward": 0.5}),
        (b'{"step": 1, "a": Infinity}', {"step": 1, "a": math.inf}),
        (b"[NaN]", None),
    ],
)
def test_a_row_has_only_names_and_numbers_that_every_reader_can_hold(line: bytes, row: Row | None) -> None:
    assert parse_row(line) == row

"""Whole runs with evaluations against a FakeEngine. Some tests kill processes on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from primeslurm.records.evaluation import EvaluationRecord, evaluations, step_dir
from primeslurm.records.metrics import rows
from primeslurm.wire.stored import checkpoints
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.runs import check_staleness
from tests.support.scripted_run import BATCHES, OFF_POLICY, STEPS
from tests.support.waiting import wait_until
from tests.unit.orchestrator.test_end_to_end import FakeRun

EXAMPLES, SAMPLES = 6, 2


class EvaluatedRun(FakeRun):
    """A run with an environment for training and one for evaluation."""

    workers = {"worker": "reverse-text", "evaluation": "held-out"}

    def __init__(self, engine: FakeEngine, root: Path, **evaluation: Any) -> None:
        environment = {
            "id": "reverse-text",
            "name": "held-out",
            "args": {"n": EXAMPLES, "seed": 7},
            "examples": 100,
            "samples": SAMPLES,
            "sampling": {"temperature": 0.5, "max_tokens": 20},
        }
        section = {"environments": [environment], "interval": 2, "at_start": True, **evaluation}
        checkpoint = {"interval": 2, "keep": 1}
        super().__init__(engine, root, {"evaluation": section, "checkpoint": checkpoint, "orchestrator": BATCHES})

    def evaluated(self) -> list[dict[str, Any]]:
        """Requests of evaluations to the engine."""
        return [request for request in self.engine.requests if "evaluation" in request["cache_salt"]]

    def wait_for(self, step: int) -> EvaluationRecord:
        return wait_until(
            lambda: next((record for record in evaluations(self.run_dir) if record.step == step), None), self.logs
        )

    def wait_for_samples(self, step: int, count: int) -> None:
        """Wait until an evaluation has this many samples on disk. It must not be finished."""

        def seen() -> bool:
            if self.samples(step) >= count:
                return True
            assert not (step_dir(self.run_dir, step) / "summary.json").exists(), "the evaluation finished too early"
            return False

        wait_until(seen, self.logs, poll_s=0.02)

    def samples(self, step: int) -> int:
        """Number of samples of an unfinished evaluation on disk."""
        try:
            return len((step_dir(self.run_dir, step) / "progress.jsonl").read_bytes().splitlines()) - 1
        except OSError:
            return 0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with FakeEngine(write_tokenizer(tmp_path / "model"), delay_s=0.05) as engine:
        yield engine


def test_run_is_evaluated_at_start_every_interval_and_at_the_end(engine: FakeEngine, tmp_path: Path) -> None:
    with EvaluatedRun(engine, tmp_path, max_inflight_rollouts=3, keep_best="held-out/reward_mean") as run:
        link = run.begin()
        run.wait_for(0)
        kept_steps = {}
        for step in range(1, STEPS + 1):
            engine._mistakes = 1 if step < 4 else 3  # the policy gets worse
            run.train(link, step)
            if step % 2 == 0:
                run.wait_for(step)
                kept_steps[step] = link.committed(step)
        assert kept_steps == {2: [2], 4: [2]}
        checkpoints.prune(run.run_dir, 1, kept_steps[4])
        assert checkpoints.committed(run.run_dir) == [2, STEPS], "the best and the last checkpoint"
        run.finished()
    records = evaluations(run.run_dir)
    assert [(record.step, record.version) for record in records] == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert (records[-1].oldest_version, records[-1].newest_version) == (STEPS, STEPS), "only the final policy sampled"
    for record in records:
        result = record.result("held-out")
        assert result is not None and (result.examples, result.samples, result.failed) == (EXAMPLES, SAMPLES, 0)
        assert 0 < result.reward.value <= 1 and result.reward.stderr is not None and set(result.pass_at) == {1, 2}
        lines = [json.loads(line) for line in (step_dir(run.run_dir, record.step) / "held-out.jsonl").open()]
        assert [line["example"] for line in lines] == list(range(EXAMPLES))
        assert all(len(line["samples"]) == SAMPLES for line in lines)
        assert not (step_dir(run.run_dir, record.step) / "progress.jsonl").exists()
    requests = run.evaluated()
    assert len(requests) == len(records) * EXAMPLES * SAMPLES
    assert all(request["sampling_params"]["temperature"] == 0.5 for request in requests)
    prompts = {tuple(request["token_ids"]) for request in requests}
    assert len(prompts) == EXAMPLES, "every evaluation has the same examples"
    table = rows(run.run_dir / "metrics.jsonl")
    assert [row["step"] for row in table] == list(range(1, STEPS + 1))
    assert [row["step"] for row in table if "eval/held-out/reward_mean" in row] == [2, 4, 5]
    check_staleness(table, OFF_POLICY)
    state, value = run.state()["evaluation"], records[1].metric("held-out/reward_mean")
    assert state["best"] == {"step": 2, "metric": "held-out/reward_mean", "value": value}
    assert state["last"]["step"] == STEPS and state["step"] is None


def test_restarted_orchestrator_repeats_no_sample_and_loses_no_evaluation(engine: FakeEngine, tmp_path: Path) -> None:
    with EvaluatedRun(engine, tmp_path, max_inflight_rollouts=1, at_start=False) as run:
        link = run.begin()
        run.train(link, 1)
        engine._delay_s = 0.5
        run.train(link, 2)
        run.wait_for_samples(2, 4)
        run.kill("orchestrator")
        there, requests_before = run.samples(2), len(run.evaluated())
        run.start("orchestrator")
        run.wait_for(2)
        again = len(run.evaluated()) - requests_before
        left = EXAMPLES * SAMPLES - there
        assert left - 1 <= again <= left + 1, "each missing sample runs once; the worker may have continued one"
        run.kill("evaluation")
        run.start("evaluation", "held-out")
        engine._delay_s = 0.05
        for step in range(3, STEPS):
            run.train(link, step)
        engine._delay_s = 0.5
        run.train(link, STEPS)
        run.wait_for_samples(STEPS, 2)
        run.kill("orchestrator")
        run.start("orchestrator")
        run.finished()
    steps = [record.step for record in evaluations(run.run_dir)]
    assert steps[0] == 2 and steps[-1] == STEPS
    done = [event["step"] for event in run.events("evaluation_done")]
    skipped = [event["step"] for event in run.events("evaluation_skipped")]
    assert sorted([*done, *skipped]) == [2, 4, 5] and done == steps, "each is done or skipped, once"
    lines = [line for line in run.metrics() if any(name.startswith("eval/") for name in line)]
    assert [line["step"] for line in lines] == steps, "each has its metrics once"


def test_new_attempt_keeps_evaluations_up_to_its_checkpoint(engine: FakeEngine, tmp_path: Path) -> None:
    # The evaluation of step 2 stays. Step 4 is trained again, so its evaluation is repeated.
    with EvaluatedRun(engine, tmp_path, at_start=False, max_inflight_rollouts=4) as run:
        link = run.begin()
        for step in (1, 2, 3):
            run.train(link, step)
        first = run.wait_for(2)
        batches = run.batch(link, 4)  # trained and published, but not committed
        assert batches
        run.publish(link, 4)
        run.wait_for(4)
        for name in ("orchestrator", "worker", "evaluation"):
            run.kill(name)
        run.attempt, run.engine.version = 2, None
        link = run.begin(2)
        for step in range(3, STEPS + 1):
            run.train(link, step)
            if step == 4:
                run.wait_for(4)
        run.finished()
    records = {record.step: record for record in evaluations(run.run_dir)}
    assert sorted(records) == [2, 4, 5] and records[2] == first
    assert (run.run_dir / "evaluations" / "step-000004.undone-2" / "summary.json").exists()
    assert [line["step"] for line in run.metrics() if "eval/seconds" in line] == [2, 4, 5]


def test_evaluation_of_an_environment_that_always_fails_ends(engine: FakeEngine, tmp_path: Path) -> None:
    # The prompts leave no room for an answer, so the engine refuses them. Training continues, and the run ends.
    with EvaluatedRun(engine, tmp_path, at_start=False, interval=100) as run:
        recipe = json.loads(run.recipe.read_text())
        recipe["evaluation"]["environments"][0]["args"] = {"n": 2, "min_length": 80, "max_length": 80}
        run.recipe.write_text(json.dumps(recipe))
        link = run.begin()
        for step in range(1, STEPS + 1):
            run.train(link, step)
        run.finished()
    (record,) = evaluations(run.run_dir)
    result = record.result("held-out")
    assert result is not None and (result.failed, result.reward.value, result.examples) == (1, 0, 2)
    assert len(run.events("evaluation_sample_failed")) == 2 * SAMPLES, "a prompt that is too long is not retried"
    assert run.events("rollout_failed") == []


def test_eval_task_needs_no_trainer_and_survives_a_restart(engine: FakeEngine, tmp_path: Path) -> None:
    engine._delay_s = 0.3
    with EvaluatedRun(engine, tmp_path, max_inflight_rollouts=1) as run:
        recipe = json.loads(run.recipe.read_text())
        run.recipe.write_text(json.dumps({**recipe, "task": "eval"}))
        run.start("orchestrator")
        run.start("evaluation", "held-out")
        run.wait_for_samples(0, 3)
        run.kill("orchestrator")
        there = run.samples(0)
        engine._delay_s = 0.01
        requests_before = len(engine.requests)
        run.start("orchestrator")
        run.finished()
    (record,) = evaluations(run.run_dir)
    assert (record.step, record.oldest_version, record.newest_version) == (0, 0, 0)
    again, left = len(engine.requests) - requests_before, EXAMPLES * SAMPLES - there
    assert left - 1 <= again <= left + 1, "each missing sample runs once; the worker may have continued one"
    assert run.state()["evaluation"]["last"]["step"] == 0

"""Whole runs against a FakeEngine, with processes killed on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primeslurm.orchestrator.environments import reverse_text
from primeslurm.wire.batches.batch import RankShard, Row
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.runs import check_staleness
from tests.support.scripted_run import BATCHES, OFF_POLICY, STEPS, Run, publish_addresses


class FakeRun(Run):
    """A run on one FakeEngine, which is its own router."""

    workers = {"worker": "reverse-text"}
    """Environment of each worker."""

    def __init__(self, engine: FakeEngine, root: Path, changes: dict[str, Any] | None = None) -> None:
        super().__init__(
            root,
            root / "model",
            [engine.url],
            {"engine-r0-0": engine.url},
            lambda run_dir, version: run_dir / str(version),
            changes or {},
        )
        self.engine = engine

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def begin(self, version: int = 0) -> TrainerLink:
        """Start the processes, and publish a policy as the trainer."""
        self.start("orchestrator")
        for name, environment in self.workers.items():
            self.start(name, environment)
        link = self.link()
        self.publish(link, version)
        return link

    def finished(self) -> None:
        """Wait until the orchestrator has ended without an error."""
        assert self.processes["orchestrator"].wait(900) == 0, self.logs()

    def state(self) -> dict[str, Any]:
        """Return what the orchestrator of the first attempt has recorded last."""
        return dict(json.loads((self.run_dir / "attempts/1/state/orchestrator.json").read_text()))


TRANSPORTS = pytest.mark.parametrize("run", ["zmq", "filesystem"], indirect=True)
"""Run a test with both transports of batches."""


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeRun]:
    options = {**BATCHES, "rollout_transport": getattr(request, "param", "zmq")}
    engine = FakeEngine(write_tokenizer(tmp_path / "model"), delay_s=0.05)
    with engine, FakeRun(engine, tmp_path, {"orchestrator": options}) as run:
        yield run


def words(run: FakeRun) -> list[str]:
    """Return the prompts of all trained rows, one entry per step and prompt."""
    tokenizer = run.engine._tokenizer
    all_prompts = []
    for rows in run.trained.values():
        prompts = set()
        for row in rows:
            text = tokenizer.decode(row, skip_special_tokens=False).replace(" ", "")
            prompts |= {part.split("<eos>")[0] for part in text.split("Reverse:")[1:]}
        all_prompts += sorted(prompts)
    return all_prompts


def finish(run: FakeRun, link: TrainerLink, step: int) -> None:
    """Train all steps from `step` on, and check the whole run."""
    for each in range(step, STEPS + 1):
        run.train(link, each)
    run.finished()
    check_whole_run(run)


def check_whole_run(run: FakeRun) -> None:
    assert sorted(run.trained) == list(range(1, STEPS + 1)), run.logs()
    prompts = words(run)
    assert len(prompts) == len(set(prompts)) == STEPS * 2, "every step trains two new prompts"
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    check_staleness(rows, OFF_POLICY)
    assert all(row["trainer/loss"] == 0.5 and 0 < row["reward/mean"] <= 1 for row in rows)
    assert any(row["reward/mean"] < 1 for row in rows), "every other answer is wrong"
    assert not list((run.run_dir / "rollouts").glob("*.damaged"))


def test_killed_processes_lose_and_repeat_nothing(run: FakeRun) -> None:
    link = run.begin()
    assert link.get_batch(STEPS + 1, RankShard(0, 2), timeout_s=60) is None, "there is no such step"
    run.train(link, 1)
    before = run.batch(link, 2)
    run.kill("orchestrator")
    run.start("orchestrator")
    after = run.batch(link, 2)
    assert [b.encode() for b in before] == [b.encode() for b in after], "a step's batch never changes"
    run.train(link, 2)
    run.kill("worker")
    run.start("worker")
    run.train(link, 3)
    link, trained = run.link(), run.trained[3]  # a restarted trainer, from the commit of step 2
    assert link.announce(2, str(run.run_dir / "2")) == 3
    assert link.offer_transfer(2, "store:1", 2, "", time.monotonic() + 60) is None, "the engines have a newer policy"
    run.train(link, 3)
    assert run.trained[3] == trained
    finish(run, link, 4)
    assert len(run.events("orchestrator_up")) == 2
    state = run.state()
    counts = state["counts"]
    assert state["step"] == STEPS and state["version"] == STEPS
    ended = sum(counts.get(how, 0) for how in ("finished", "failed", "cancelled", "lost"))
    assert counts["dispatched"] == ended + state["inflight"]
    assert any(path.name.startswith("events.out") for path in (run.run_dir / "tensorboard").iterdir())


@TRANSPORTS
def test_restarted_trainer_gets_every_uncommitted_batch(run: FakeRun) -> None:
    link = run.begin()
    run.train(link, 1, commits=True)
    for step in range(2, STEPS):
        run.train(link, step, commits=False)
    before = dict(run.trained)
    run.kill("orchestrator")
    run.start("orchestrator")
    for again in (run.link(), run.link()):
        assert again.announce(1, str(run.run_dir / "1")) == STEPS - 1
        for step in range(2, STEPS):
            run.train(again, step, commits=False)
        assert run.trained == before, "the same rows as the first time"
    run.train(again, STEPS, commits=True)
    run.finished()
    check_whole_run(run)


@TRANSPORTS
def test_new_attempt_continues_at_the_last_commit(run: FakeRun) -> None:
    link = run.begin()
    for step in (1, 2, 3):
        run.train(link, step)
    time.sleep(1)
    for name in ("orchestrator", "worker"):
        run.kill(name)
    run.attempt = 2
    run.engine.version = None
    del run.trained[3]
    link = run.begin(2)
    finish(run, link, 3)
    salts = [request["cache_salt"].split(":")[0] for request in run.engine.requests]
    assert salts == sorted(salts) and salts[0] == "test-1.1", "attempts do not overlap"
    assert set(salts) <= {"test-1.1", "test-1.2"}  # the first attempt may have sampled everything
    assert [path for path in run.run_dir.glob("batches/**/*") if path.is_file()] == [], "all steps are committed"


def test_late_teacher_and_a_restart_lose_no_group(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model")
    with FakeEngine(tokenizer, delay_s=0.05) as engine, FakeEngine(tokenizer) as teacher:
        changes = {
            "max_steps": 2,
            "teacher": {"type": "engines", "path": "/models/teacher"},
            "orchestrator": {**BATCHES, "advantages": "opd", "opd_reward": 0.5},
        }
        run = FakeRun(engine, tmp_path, changes)
        run.teachers["teacher-0"] = "http://127.0.0.1:9"
        with run:
            link = run.begin()
            spool = run.run_dir / "rollouts"
            run.wait_until(lambda: len(list(spool.glob("*.group"))) >= 4)
            run.wait_until(lambda: run.state()["unscored_groups"] >= 4)
            run.kill("orchestrator")
            run.teachers["teacher-0"] = teacher.url
            run.start("orchestrator")
            sampled = len(engine.requests)
            gaps = []
            for batch in run.batch(link, 1):
                for row in batch.rows:
                    assert row.ref_logprobs is not None
                    assert (row.ref_logprobs == np.where(row.mask, -row.positions / 16, 0)).all()
                    gap = (row.advantages - row.ref_logprobs + row.logprobs)[row.mask]
                    assert (np.abs(gap) <= 0.5).all(), "the reward relative to the group's mean, halved"
                    gaps.append(gap)
            assert np.concatenate(gaps).any(), "some groups have right and wrong answers"
            assert len(engine.requests) == sampled, "rollouts from before the restart are trained"
            for step in (1, 2):
                run.train(link, step)
            run.finished()
    rows = run.metrics()
    assert all(row["teacher/kl"] != 0 for row in rows)
    assert sum(row["teacher/tokens"] for row in rows) > 0 and sum(row["teacher/seconds"] for row in rows) > 0


def trained_as_wanted(row: Row) -> bool:
    """The first token of each answer has a policy loss, all others cross-entropy."""
    starts = np.flatnonzero(row.positions == 0)
    assert row.echo_weights is not None
    answers = []
    for mask, echoed in zip(np.split(row.mask, starts[1:]), np.split(row.echo_weights > 0, starts[1:]), strict=True):
        places = np.flatnonzero(mask | echoed)
        if len(places):  # padding has none
            answers.append(mask[places].tolist() == [True, *[False] * (len(places) - 1)] and len(places) > 1)
    return all(answers)


def test_run_with_a_custom_algorithm(tmp_path: Path) -> None:
    """It trains every second prompt: one token of each answer by policy loss, the others by cross-entropy."""
    chosen = {"function": "tests.unit.orchestrator.test_algorithms:FirstTokens", "kwargs": {"tokens": 1}}
    in_order = {"environments": [{"id": "reverse-text", "shuffle": False}]}
    changes = {"max_steps": 2, "orchestrator": {**BATCHES, "algorithm": chosen}, **in_order}
    engine = FakeEngine(write_tokenizer(tmp_path / "model"), delay_s=0.01)
    with engine, FakeRun(engine, tmp_path, changes) as run:
        link = run.begin()
        for step in (1, 2):
            for batch in run.batch(link, step):
                assert batch.info.loss_tokens == 8
                assert all(trained_as_wanted(row) for row in batch.rows)
            run.train(link, step)
        run.finished()
    trained_words = list(reverse_text.words(40, 0))[::2]
    assert set(words(run)) <= set(trained_words) and len(words(run)) == 4
    assert run.state()["counts"]["groups_rejected_odd"] > 0
    assert sum(row.get("groups/rejected_odd", 0) for row in run.metrics()) > 0


def test_error_of_a_custom_algorithm_reaches_the_trainer(tmp_path: Path) -> None:
    name = "tests.unit.orchestrator.test_algorithms:ReturnsNone"
    changes = {"orchestrator": {"batch_size": 4, "group_size": 4, "algorithm": {"function": name}}}
    engine = FakeEngine(write_tokenizer(tmp_path / "model"))
    with engine, FakeRun(engine, tmp_path, changes) as run:
        link = run.begin()
        with pytest.raises(LinkError, match=rf"algorithm\.function = {name}: assign returned a NoneType"):
            run.batch(link, 1)


def test_missing_custom_algorithm_ends_the_attempt(tmp_path: Path) -> None:
    changes = {"orchestrator": {"algorithm": {"function": "no_such_module:Algorithm"}}}
    engine = FakeEngine(write_tokenizer(tmp_path / "model"))
    with engine, FakeRun(engine, tmp_path, changes) as run:
        for name in ("orchestrator", "worker"):
            run.start(name)
        assert [run.processes[name].wait(600) for name in ("orchestrator", "worker")] == [2, 1]
    expected = "orchestrator.algorithm.function = no_such_module:Algorithm: cannot be imported: No module named"
    assert (tmp_path / "orchestrator.log").read_text().startswith(expected)
    assert expected in (tmp_path / "worker.log").read_text()


def test_run_continues_without_a_lost_replica(tmp_path: Path) -> None:
    """One of two engines never answers, until the head gives up its replica."""
    tokenizer = write_tokenizer(tmp_path / "model")
    with FakeEngine(tokenizer, delay_s=0.05) as good, FakeEngine(tokenizer, delay_s=3600) as bad:
        run = FakeRun(good, tmp_path)
        run.routers.append(bad.url)
        run.engines["engine-r1-0"] = bad.url
        with run:
            link = run.begin()
            run.wait_until(lambda: bad.requests)
            urls = {"router-0": good.url, "router-1": bad.url} | run.engines
            publish_addresses(run.run_dir / "attempts" / "1", urls, lost=["router-1", "engine-r1-0"])
            run.wait_until(lambda: run.events("replica_lost"))  # three steps later its rollouts would be too old
            for step in range(1, STEPS + 1):
                run.train(link, step)
            run.finished()
    (event,) = run.events("replica_lost")
    assert event["router"] == "router-1" and int(str(event["rollouts"])) > 0
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))


def test_two_environments_with_a_curriculum_survive_kills(tmp_path: Path) -> None:
    """Group sizes, temperatures, filters and pools survive a kill and a new attempt."""
    small = {"min_length": 2, "max_length": 4, "n": 6}
    changes = {
        "max_steps": 4,
        "environments": [
            {"id": "reverse-text", "group_size": 2, "filters": [{"type": "truncated"}]},
            {
                "id": "reverse-text",
                "name": "pooled",
                "args": small,
                "sampling": {"temperature": 0.5},
                "weight": 0.25,
                "solved_reward": 0.9,
                "curriculum": {"alpha": 1.0},
            },
        ],
        "orchestrator": {
            **BATCHES,
            "filters": [{"type": "zero_advantage", "action": "monitor"}, {"type": "length", "max_tokens": 100}],
        },
    }
    engine = FakeEngine(write_tokenizer(tmp_path / "model"), delay_s=0.05)
    with engine, FakeRun(engine, tmp_path, changes) as run:
        run.start("orchestrator")
        run.start("worker")
        run.start("pooled", "pooled")
        state = run.run_dir / "attempts/1/state/orchestrator.json"
        run.wait_until(lambda: state.exists() and len(run.state()["environments"]) == 2)
        link = run.link()
        run.publish(link, 0)
        run.train(link, 1)
        run.kill("orchestrator")
        run.start("orchestrator")
        for step in (2, 3):
            run.train(link, step)
        run.kill("orchestrator")
        run.attempt, run.engine.version = 2, None
        run.start("orchestrator")
        link = run.link()
        run.publish(link, 2)
        for step in (3, 4):
            run.train(link, step)
        run.finished()
    rows = run.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4], run.logs()
    assert {"env/reverse-text/filters/truncated", "env/pooled/filters/zero_advantage"} <= rows[-1].keys()
    pool_names = ("unseen", "easy", "normal", "hard", "solved", "failed")
    assert all(sum(row[f"env/pooled/pool/{name}"] for name in pool_names) == small["n"] for row in rows)
    assert any(0 <= row.get("env/pooled/solve_rate", -1) <= 1 for row in rows)
    unseen = [row["env/pooled/pool/unseen"] for row in rows]
    assert unseen == sorted(unseen, reverse=True) and unseen[-1] < small["n"], "no example is unseen again"
    outcomes = [json.loads(line) for line in (run.run_dir / "rollouts/outcomes.jsonl").read_text().splitlines()]
    assert len({name for name, _, _ in outcomes}) == len(outcomes) and all(0 <= task < 6 for _, task, _ in outcomes)
    temperatures = {request["sampling_params"]["temperature"] for request in engine.requests}
    assert temperatures == {1.0, 0.5}

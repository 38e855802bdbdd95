"""Orchestrator and worker processes, a FakeEngine, and a scripted trainer on the real TrainerLink."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from primeslurm.recipe import Recipe
from primeslurm.wire import checkpoints
from primeslurm.wire.link import TrainerLink
from primeslurm.wire.rollouts import Batch
from tests.support.fake_engine import FakeEngine, write_tokenizer

STEPS = 5
OFF_POLICY = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Run:
    """One run's processes and its scripted trainer."""

    root: Path
    engine: FakeEngine
    attempt: int = 1
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    trained: dict[int, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wire = f"tcp://127.0.0.1:{free_port()}"
        self.envs = f"tcp://127.0.0.1:{free_port()}"
        self.run_dir = self.root / "run"
        self.run_dir.mkdir()
        recipe = Recipe.model_validate(
            {
                "name": "test",
                "max_steps": STEPS,
                "seq_len": 64,
                "model": {"path": str(write_tokenizer(self.root / "model"))},
                "environments": [{"id": "reverse-text"}],
                "checkpoint": {"interval": 2},
                "orchestrator": {"batch_size": 8, "group_size": 4, "max_off_policy_steps": OFF_POLICY},
            }
        )
        self.recipe = self.root / "recipe.json"
        self.recipe.write_text(recipe.model_dump_json(by_alias=True))

    def start(self, name: str) -> None:
        common = ["--recipe", str(self.recipe)]
        if name == "orchestrator":
            command = ["primeslurm.orchestrator", *common, "--run-dir", str(self.run_dir), "--run-id", "test-1"]
            command += ["--attempt", str(self.attempt), "--bind", self.wire, "--env-bind", self.envs]
            command += ["--routers", self.engine.url, "--engines", f"engine-r0-0={self.engine.url}"]
        else:
            command = ["primeslurm.orchestrator.worker", *common, "--environment", "reverse-text", "--worker", "0"]
            command += [
                "--orchestrator",
                self.envs,
                "--attempt-dir",
                str(self.run_dir / "attempts" / str(self.attempt)),
            ]
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def link(self) -> TrainerLink:
        return TrainerLink(self.wire, timeout_s=90, retry_s=6)

    def publish(self, link: TrainerLink, version: int) -> None:
        link.published(version, str(self.run_dir / "weights" / f"v{version:06d}"))

    def batch(self, link: TrainerLink, step: int) -> list[Batch]:
        batches = [link.get_batch(step, rank, 2, timeout_s=60) for rank in range(2)]
        assert all(batch is not None for batch in batches)
        return [batch for batch in batches if batch is not None]

    def train(self, link: TrainerLink, step: int) -> None:
        batches = self.batch(link, step)
        assert len({len(batch.rows) for batch in batches}) == 1
        assert sum(int(row.mask.sum()) for batch in batches for row in batch.rows) == batches[0].info.loss_tokens
        self.trained[step] = [row.token_ids.tolist() for batch in batches for row in batch.rows]
        self.publish(link, step)
        link.step_done(step, {"loss": 0.5})
        if step % 2 == 0 or step == STEPS:
            directory = checkpoints.step_dir(self.run_dir, step)
            link.save(step, str(directory))
            checkpoints.commit(directory, step, self.attempt)
            link.committed(step)

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, object]]:
        paths = self.run_dir.glob("attempts/*/events/orchestrator.jsonl")
        events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return [event for event in events if event["kind"] == kind]

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self.root.glob("*.log"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = FakeEngine(write_tokenizer(tmp_path / "tokenizer"), delay_s=0.05)
    run = Run(tmp_path, made)
    yield run
    for process in run.processes.values():
        process.kill()
        process.wait()
    made.stop()


def words(run: Run) -> list[str]:
    """The prompts of all trained rows, one entry per step and prompt."""
    tokenizer = run.engine._tokenizer
    found = []
    for rows in run.trained.values():
        prompts = set()
        for row in rows:
            text = tokenizer.decode(row, skip_special_tokens=False).replace(" ", "")
            prompts |= {part.split("<eos>")[0] for part in text.split("Reverse:")[1:]}
        found += sorted(prompts)
    return found


def check_whole_run(run: Run) -> None:
    assert sorted(run.trained) == list(range(1, STEPS + 1)), run.logs()
    prompts = words(run)
    assert len(prompts) == len(set(prompts)) == STEPS * 2, "every step trains two prompts that no other step trains"
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["staleness/max"] <= OFF_POLICY for row in rows)
    assert all(row["trainer/loss"] == 0.5 and 0 < row["reward/mean"] < 1 for row in rows)
    assert not list((run.run_dir / "rollouts").glob("*.damaged"))


def test_a_run_from_first_to_last_step(run: Run) -> None:
    run.start("orchestrator")
    run.start("worker")
    link = run.link()
    run.publish(link, 0)
    for step in range(1, STEPS + 1):
        run.train(link, step)
    assert link.get_batch(STEPS + 1, 0, 2, timeout_s=5) is None
    assert run.processes["orchestrator"].wait(60) == 0, run.logs()
    check_whole_run(run)
    state = json.loads((run.run_dir / "attempts/1/state/orchestrator.json").read_text())
    assert state["step"] == STEPS and state["version"] == STEPS
    counts = state["counts"]
    ended = sum(counts.get(how, 0) for how in ("finished", "failed", "cancelled", "lost"))
    assert counts["dispatched"] == ended + state["inflight"]
    assert any(path.name.startswith("events.out") for path in (run.run_dir / "tensorboard").iterdir())


def test_killed_processes_lose_and_repeat_nothing(run: Run) -> None:
    run.start("orchestrator")
    run.start("worker")
    link = run.link()
    run.publish(link, 0)
    run.train(link, 1)
    before = run.batch(link, 2)
    run.kill("orchestrator")
    run.start("orchestrator")
    after = run.batch(link, 2)
    assert [b.encode() for b in before] == [b.encode() for b in after], "a step's batch never changes"
    run.train(link, 2)
    run.kill("worker")
    run.start("worker")
    for step in range(3, STEPS + 1):
        run.train(link, step)
    assert run.processes["orchestrator"].wait(60) == 0, run.logs()
    check_whole_run(run)
    assert len(run.events("orchestrator_up")) == 2


def test_a_new_attempt_continues_at_the_last_commit(run: Run) -> None:
    run.start("orchestrator")
    run.start("worker")
    link = run.link()
    run.publish(link, 0)
    for step in (1, 2, 3):
        run.train(link, step)
    time.sleep(1)
    for name in ("orchestrator", "worker"):
        run.kill(name)
    run.attempt = 2
    run.engine.version = None
    del run.trained[3]
    run.start("orchestrator")
    run.start("worker")
    link = run.link()
    run.publish(link, 2)
    for step in range(3, STEPS + 1):
        run.train(link, step)
    assert run.processes["orchestrator"].wait(60) == 0, run.logs()
    check_whole_run(run)
    assert {request["cache_salt"].split(":")[0] for request in run.engine.requests} == {"test-1.1", "test-1.2"}

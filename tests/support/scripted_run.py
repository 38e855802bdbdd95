"""Orchestrator and worker as processes, and a scripted trainer on the real TrainerLink."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.ports import free_port
from primeslurm.base.files import write_json
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.batch import Batch, RankShard
from primeslurm.wire.link.trainer_link import TrainerLink
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport.addresses import FILE
from tests.support.forks import ORCHESTRATOR, Forked, server

STEPS = 5
OFF_POLICY = 2
BATCHES = {"batch_size": 8, "group_size": 4, "max_off_policy_steps": OFF_POLICY}


def publish_addresses(attempt_dir: Path, urls: dict[str, str], lost: Sequence[str] = ()) -> None:
    """Write the addresses of processes as the head does."""
    parts = {name: url.removeprefix("http://").split(":") for name, url in urls.items()}
    hosts = {name: host for name, (host, _) in parts.items()}
    ports = {name: {"http": int(port)} for name, (_, port) in parts.items()}
    attempt_dir.mkdir(parents=True, exist_ok=True)
    write_json(attempt_dir / FILE, {"hosts": hosts, "ports": ports, "lost": list(lost)})


@dataclass
class Run:
    """The processes of a run, and its scripted trainer."""

    root: Path
    model: Path
    routers: list[str]
    """URLs of router-0, router-1, ..."""
    engines: dict[str, str]
    """URL by process name."""
    publish_weights: Callable[[Path, int], Path]
    """Writes the weights of a version into the run directory, and returns their path."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to the recipe."""
    orchestrator: str = "primeslurm.orchestrator"
    """Module of the orchestrator."""
    teachers: dict[str, str] = field(default_factory=dict)
    """URL by process name."""
    attempt: int = 1
    processes: dict[str, Forked] = field(default_factory=dict)
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
                "model": {"path": str(self.model)},
                "environments": [{"id": "reverse-text"}],
                "checkpoint": {"interval": 2},
                "orchestrator": BATCHES,
                **self.changes,
            }
        )
        self.recipe = self.root / "recipe.json"
        self.recipe.write_text(recipe.model_dump_json(by_alias=True))

    def start(self, name: str, environment: str = "reverse-text") -> None:
        """Start the orchestrator, or, under any other name, a worker of an environment."""
        publish_addresses(
            self.run_dir / "attempts" / str(self.attempt),
            {f"router-{i}": url for i, url in enumerate(self.routers)} | self.engines | self.teachers,
        )
        common = ["--recipe", str(self.recipe)]
        if name == "orchestrator":
            command = [self.orchestrator, *common, "--run-dir", str(self.run_dir), "--run-id", "test-1"]
            command += ["--attempt", str(self.attempt), "--bind", self.wire, "--env-bind", self.envs]
            command += ["--routers", ",".join(f"router-{i}" for i in range(len(self.routers)))]
            command += ["--engines", ",".join(self.engines), "--teachers", ",".join(self.teachers)]
        else:
            attempt = str(self.run_dir / "attempts" / str(self.attempt))
            command = ["primeslurm.orchestrator.worker.main", *common, "--environment", environment, "--worker", "0"]
            command += ["--orchestrator", self.envs, "--attempt-dir", attempt]
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = server(ORCHESTRATOR).start(*command, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Poll until `condition()` is true. Fail with the logs if a process ends before."""
        while not condition():
            assert all(process.poll() is None for process in self.processes.values()), self.logs()
            time.sleep(0.1)

    def link(self) -> TrainerLink:
        return TrainerLink(self.wire, timeout_s=600, retry_s=6)

    def publish(self, link: TrainerLink, version: int) -> None:
        link.announce(version, str(self.publish_weights(self.run_dir, version)))

    def batch(self, link: TrainerLink, step: int) -> list[Batch]:
        batches = [link.get_batch(step, RankShard(rank, 2), timeout_s=900) for rank in range(2)]
        assert all(batch is not None for batch in batches)
        return [batch for batch in batches if batch is not None]

    def train(self, link: TrainerLink, step: int, *, commits: bool | None = None) -> None:
        batches = self.batch(link, step)
        assert len({len(batch.rows) for batch in batches}) == 1
        assert sum(int(row.mask.sum()) for batch in batches for row in batch.rows) == batches[0].info.loss_tokens
        self.trained[step] = [row.token_ids.tolist() for batch in batches for row in batch.rows]
        self.publish(link, step)
        link.step_done(step, {"loss": 0.5})
        if (step % 2 == 0 or step == STEPS) if commits is None else commits:
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

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self.root.glob("*.log"))

"""The RL loop as real processes, against a real OrchestratorLink."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.ports import free_port
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.batch import RankShard
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.link.messages import Answer, Committed, GetBatch, Request, Save, StepDone
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.weight_transfer import filesystem, messages
from tests.support.forks import Forked
from tests.trainer.conftest import finish, make_batch, make_recipe, start_ranks, trainer_command


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.05)


class FakeOrchestrator:
    """A fake orchestrator on a thread: synthetic batches up to `limit`, then "wait". Records all requests."""

    def __init__(self) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.limit = 10**6
        self.stop_at: int | None = None
        self.requests: list[Request] = []
        self.refuse_save = False
        self.on_policy = False
        """True if a batch needs rollouts of the newest policy."""
        self.transfer_at: int | None = None
        """Step before which engines request the current policy again."""
        self.engines_ready = True
        """False: the trainer waits for engines that need the policy that it offers."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def serve() -> None:
            self._task = asyncio.current_task()
            await OrchestratorLink(self.address, self._answer).serve()

        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(serve())

    async def _answer(self, request: Request) -> Sequence[Frame] | Answer:
        if not isinstance(request, GetBatch) or request not in self.requests:
            self.requests.append(request)
        if isinstance(request, GetBatch):
            if request.step == self.transfer_at:
                self.transfer_at = None
                return Answer("transfer")
            if request.step == self.stop_at:
                return Answer("stop")
            newest = max((each.version for each in self.of(messages.NewPolicy)), default=0)
            if request.step > self.limit or (self.on_policy and newest < request.step - 1):
                await asyncio.sleep(0.2)
                return Answer("wait")
            return make_batch(request.step, request.shard.dp_rank, request.shard.dp_world).encode()
        if isinstance(request, messages.OfferTransfer) and not self.engines_ready:
            await asyncio.sleep(0.02)
            return Answer("wait")
        if isinstance(request, Save):
            if self.refuse_save:
                raise OSError("no space left on device")
            (Path(request.directory) / "orchestrator.bin").write_bytes(b"orchestrator part")
        return Answer("ok")

    def of(self, kind: type) -> list[Request]:
        return [request for request in self.requests if isinstance(request, kind)]

    def wait_for(self, request: Request) -> None:
        until(lambda: request in self.requests, f"{request} among {self.requests}")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(timeout=60)


@pytest.fixture
def orchestrator() -> Iterator[FakeOrchestrator]:
    fake = FakeOrchestrator()
    yield fake
    fake.close()


class Run:
    """A run directory with its recipe and attempts."""

    def __init__(self, directory: Path, recipe: Recipe, orchestrator: FakeOrchestrator) -> None:
        self.directory = directory
        self._path = directory / "recipe.json"
        self._path.write_text(recipe.model_dump_json(by_alias=True))
        self._orchestrator = orchestrator
        self._attempt = 0

    def start(self, size: int = 1, module: str = "primeslurm.trainer") -> list[Forked]:
        self._attempt += 1
        _, *arguments = trainer_command(self._path, self.directory, self._attempt, self._orchestrator.address)
        return start_ranks(size, module, *arguments)

    def state(self) -> dict[str, Any]:
        path = self.directory / "attempts" / str(self._attempt) / "state" / "trainer-rank-0.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def events(self, attempt: int, rank: int = 0) -> list[str]:
        path = self.directory / "attempts" / str(attempt) / "events" / f"trainer-rank-{rank}.jsonl"
        return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


def test_trains_publishes_and_commits(moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path) -> None:
    recipe = make_recipe(moe_model, max_steps=5, checkpoint={"interval": 2, "keep": 2}, weights={"keep": 2})
    run = Run(tmp_path, recipe, orchestrator)
    finish(run.start())

    assert [r.version for r in orchestrator.of(messages.NewPolicy)] == [0, 1, 2, 3, 4, 5]
    assert orchestrator.of(messages.NewPolicy)[0].path == str(moe_model)
    assert [r.step for r in orchestrator.of(StepDone)] == [1, 2, 3, 4, 5]
    ahead = {r.step for r in orchestrator.of(GetBatch) if r.ahead}
    assert ahead and ahead <= {2, 3, 4, 5}, "while the step before runs, but for the first"
    assert [r.step for r in orchestrator.of(Committed)] == [2, 4, 5]
    assert checkpoints.committed(tmp_path) == [4, 5]
    assert checkpoints.damage(checkpoints.step_dir(tmp_path, 5)) == []
    record = checkpoints.read_commit(checkpoints.step_dir(tmp_path, 5))
    assert record is not None and record.attempt == 1
    names = {part.name for part in record.parts}
    assert "orchestrator.bin" in names and "trainer/.metadata" in names
    # v2 was still needed, by the checkpoint of step 2, when v5 was published.
    assert filesystem.published(tmp_path) == [2, 4, 5]
    metrics = orchestrator.of(StepDone)[-1].metrics
    expected = {
        "loss",
        "off_policy_kl",
        "mismatch_kl",
        "on_policy_fraction",
        "entropy",
        "masked_fraction",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
    }
    expected |= {f"seconds/{name}" for name in ("wait", "forward_backward", "optimizer", "publish", "checkpoint")}
    assert expected <= set(metrics)
    assert run.events(1)[:2] == ["start", "loaded"] and run.events(1)[-1] == "stop"
    assert all(filesystem.damage(filesystem.version_dir(tmp_path, version)) == [] for version in (2, 4, 5))
    assert run.state()["step"] == 5 and run.state()["phase"] == "checkpoint"


def test_interrupt_while_waiting_saves_and_resumes(
    moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    recipe = make_recipe(
        moe_model,
        max_steps=4,
        trainer={"optimizer": {"type": "muon"}},
        checkpoint={"interval": 100, "asynchronous": True},
    )
    run = Run(tmp_path, recipe, orchestrator)
    orchestrator.limit = 2
    ranks = run.start(size=2)
    orchestrator.wait_for(GetBatch(3, RankShard(0, 2)))
    ranks[1].send_signal(signal.SIGUSR1)  # not rank 0, which is the one that waits
    finish(ranks, code=75)
    assert checkpoints.committed(tmp_path) == [2]

    orchestrator.requests.clear()
    orchestrator.limit = 10**6
    shutil.rmtree(filesystem.version_dir(tmp_path, 2))  # the resumed attempt must publish it again
    finish(run.start(size=1))
    assert [r.version for r in orchestrator.of(messages.NewPolicy)] == [2, 3, 4]
    assert [r.step for r in orchestrator.of(StepDone)] == [3, 4]
    assert checkpoints.newest(tmp_path) == 4


def test_killed_attempt_resumes_at_the_last_commit(
    moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    recipe = make_recipe(
        moe_model,
        max_steps=3,
        trainer={"memory": {"optimizer_offload": True}},
        checkpoint={"interval": 1, "keep": 5},
        weights={"keep": 5},
    )
    run = Run(tmp_path, recipe, orchestrator)
    orchestrator.limit = 2
    ranks = run.start()
    orchestrator.wait_for(GetBatch(3, RankShard(0, 1)))
    ranks[0].kill()
    finish(ranks, code=-signal.SIGKILL)
    (checkpoints.step_dir(tmp_path, 2) / "trainer" / ".metadata").write_bytes(b"damaged after its commit")

    orchestrator.requests.clear()
    orchestrator.limit = 10**6
    log = finish(run.start())[0]
    assert "checkpoint of step 2 is damaged" in log
    assert [r.step for r in orchestrator.of(StepDone)] == [2, 3]
    published = [(r.version, r.path) for r in orchestrator.of(messages.NewPolicy)]
    assert published[0] == (1, str(filesystem.version_dir(tmp_path, 1)))
    assert [version for version, _ in published] == [1, 2, 3]
    assert checkpoints.committed(tmp_path) == [1, 2, 3]


def test_orchestrator_ends_the_run(moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path) -> None:
    run = Run(tmp_path, make_recipe(moe_model, max_steps=9, checkpoint={"interval": 100}), orchestrator)
    orchestrator.stop_at = 2
    finish(run.start())
    assert checkpoints.committed(tmp_path) == [1]


def test_policies_are_sent_to_late_engines_again(
    moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    recipe = make_recipe(moe_model, max_steps=2, checkpoint={"interval": 100}, weights={"transport": "nccl"})
    orchestrator.transfer_at = 2
    finish(Run(tmp_path, recipe, orchestrator).start())
    published = [(r.version, r.path) for r in orchestrator.of(messages.NewPolicy)]
    assert published == [(0, str(moe_model)), (1, ""), (2, "")]
    assert [r.version for r in orchestrator.of(messages.OfferTransfer)] == [1, 1, 2]
    assert filesystem.published(tmp_path) == [2], "only what the run has made is written"


def test_policy_is_sent_beside_the_next_step(moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path) -> None:
    recipe = make_recipe(moe_model, max_steps=3, checkpoint={"interval": 100}, weights={"transport": "nccl"})
    run = Run(tmp_path, recipe, orchestrator)
    orchestrator.engines_ready = False
    ranks = run.start(2)
    until(lambda: (run.state().get("step"), run.state().get("phase")) == (2, "publish"), "end of step 2")
    assert [r.step for r in orchestrator.of(StepDone)] == [1], "step 2 is trained, and waits for version 1"
    assert {r.version for r in orchestrator.of(messages.OfferTransfer)} == {1}
    orchestrator.engines_ready = True
    finish(ranks)
    assert [r.version for r in orchestrator.of(messages.NewPolicy)] == [0, 1, 2, 3]
    assert {r.version for r in orchestrator.of(messages.OfferTransfer)} == {1, 2, 3}
    assert run.events(1).count("published") == run.events(1, rank=1).count("published") == 3


def test_rejected_checkpoint_ends_the_attempt_without_a_commit(
    moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    run = Run(tmp_path, make_recipe(moe_model, max_steps=3, checkpoint={"interval": 1}), orchestrator)
    orchestrator.refuse_save = True
    log = finish(run.start(), code=1)[0]
    assert "checkpoint of step 1 failed: rank 0: OSError: no space left on device" in log
    assert checkpoints.committed(tmp_path) == []


def test_unwritable_disk_is_reported(moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path) -> None:
    run = Run(tmp_path, make_recipe(moe_model, max_steps=2), orchestrator)
    (tmp_path / "weights").write_text("a file where a directory must be made")
    log = finish(run.start(), code=1)[0]
    assert "publishing v1 failed: rank 0" in log
    assert orchestrator.of(messages.NewPolicy) == [messages.NewPolicy(0, str(moe_model))]


HELD = "tests.trainer.loops.held_writes"


def test_policy_is_written_beside_the_next_step(
    moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    trainer = {"optimizer": {"lr": 1e-3}, "batch_timeout_s": 1}  # shorter than the pause of a full disk
    run = Run(tmp_path, make_recipe(moe_model, max_steps=3, trainer=trainer), orchestrator)
    gate = tmp_path / "gate"
    gate.touch()
    ranks = run.start(2, HELD)
    until(lambda: (run.state().get("step"), run.state().get("phase")) == (3, "publish"), "end of step 3")
    assert [r.step for r in orchestrator.of(StepDone)] == [1, 2], "step 3 is trained, and waits for version 2"
    assert [r.version for r in orchestrator.of(messages.NewPolicy)] == [0, 1]
    assert filesystem.published(tmp_path) == [1]
    for rank in ranks:
        rank.kill()
    finish(ranks, code=-signal.SIGKILL)

    orchestrator.requests.clear()
    orchestrator.on_policy = True  # no batch of step 3 before version 2 is announced
    gate.write_text(str(errno.ENOSPC))
    ranks = run.start(2, HELD)
    until(lambda: (tmp_path / "failed").exists(), "failed write")
    until(lambda: [r.step for r in orchestrator.of(StepDone)] == [1, 2], "report of step 2")
    gate.unlink()
    finish(ranks)
    assert [r.version for r in orchestrator.of(messages.NewPolicy)] == [0, 1, 2, 3]
    assert run.events(2).count("published") == run.events(2, rank=1).count("published") == 3
    assert filesystem.published(tmp_path) == [1, 2, 3]
    assert all(filesystem.damage(filesystem.version_dir(tmp_path, version)) == [] for version in (2, 3))


@pytest.mark.parametrize("on_policy", [False, True])
def test_failed_write_beside_a_step_is_reported(
    on_policy: bool, moe_model: Path, orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    run = Run(tmp_path, make_recipe(moe_model, max_steps=3), orchestrator)
    orchestrator.on_policy = on_policy
    (tmp_path / "gate").write_text(str(errno.EACCES))
    log = finish(run.start(module=HELD), code=1)[0]
    assert "RankError: publishing v2 failed: rank 0: [Errno 13] Permission denied" in log
    assert [r.version for r in orchestrator.of(messages.NewPolicy)] == [0, 1]
    assert filesystem.published(tmp_path) == [1]

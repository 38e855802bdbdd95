"""The training loop of a tenant with the service: resume, checkpoints and exported adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from primeslurm.tenants import tinker_client
from primeslurm.tenants.loop import TenantTask
from primeslurm.tenants.tinker_client import MissingError, TinkerClient
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.batch import Batch
from primeslurm.wire.stored import checkpoints
from tests.trainer.conftest import make_timer
from tests.trainer.tinker.conftest import Api
from tests.trainer.tinker.test_tenant_step import batch_of, tenant_recipe


class Killed(Exception):
    """The process ends here."""


class FakeLink:
    """The orchestrator of one attempt. The trainer dies when it asks for the batch of step `kill_at`."""

    def __init__(self, kill_at: int = 0) -> None:
        self.kill_at = kill_at
        self.announced: dict[int, str] = {}
        self.trained: list[int] = []
        self.committed_steps: list[int] = []

    def get_batch(self, step: int, shard: Any, timeout_s: float, interrupted: Callable[[], bool]) -> Batch | None:
        if step == self.kill_at:
            raise Killed
        return None if interrupted() else batch_of(step)

    def announce(self, version: int, path: str) -> int:
        self.announced.setdefault(version, path)
        return max(self.announced)

    def save(self, step: int, directory: str) -> None:
        Path(directory, "orchestrator.bin").write_bytes(b"state")

    def committed(self, step: int) -> list[int]:
        self.committed_steps.append(step)
        return []

    def step_done(self, step: int, metrics: dict[str, float]) -> None:
        self.trained.append(step)


class Run:
    """A run of four steps with checkpoints after steps 2 and 4."""

    def __init__(self, api: Api, model: Path, directory: Path) -> None:
        self.directory = directory
        tenant = {"service": "http://a", "router": "http://b", "adapters": str(directory / "data" / "checkpoints")}
        keep = {"checkpoint": {"interval": 2, "keep": 1}, "weights": {"keep": 1}}
        self.recipe = tenant_recipe(model, tenant=tenant, **keep)
        self.use(api)
        (directory / "run").mkdir()

    def use(self, api: Api) -> None:
        api.http.headers["X-API-Key"] = api.key
        self.api = api

    def train(self, link: FakeLink, interrupted: Callable[[], bool] = lambda: False) -> int:
        timer, client = make_timer(self.directory / "run"), TinkerClient(self.api.http)
        task = TenantTask(self.recipe, self.directory / "run", 1, client, link, timer, interrupted)  # type: ignore[arg-type]
        return task.run()

    def saved(self) -> list[str]:
        """Return the checkpoints in the service, without the session."""
        return sorted(str(each["checkpoint_id"]) for each in TinkerClient(self.api.http).checkpoints())


@pytest.fixture
def run(serve: Callable[..., Api], dense_model: Path, tmp_path: Path) -> Run:
    return Run(serve(), dense_model, tmp_path)


def adapter(path: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(Path(path) / "adapter_model.safetensors")
    return tensors


def test_run_announces_every_version_and_keeps_what_the_recipe_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    link, listed, checkpoints_of = FakeLink(), list[int](), TinkerClient.checkpoints
    with monkeypatch.context() as patch:
        patch.setattr(TinkerClient, "checkpoints", lambda self: listed.append(1) or checkpoints_of(self))
        assert run.train(link) == 0
    assert len(listed) == 1, "the service's list is read at the start only"
    assert link.trained == [1, 2, 3, 4] and link.committed_steps == [2, 4]
    assert link.announced[0] == run.recipe.model.path and list(link.announced) == [0, 1, 2, 3, 4]
    assert run.saved() == ["external_weights/v000004", "weights/step_000004"]
    assert checkpoints.committed(run.directory / "run") == [4]
    assert all(tensor.isfinite().all() for tensor in adapter(link.announced[4]).values())


@pytest.mark.parametrize("service_restarts", [False, True])
def test_killed_trainer_resumes_at_its_checkpoint_exactly(
    run: Run, serve: Callable[..., Api], tmp_path: Path, service_restarts: bool
) -> None:
    link = FakeLink(kill_at=4)
    with pytest.raises(Killed):
        run.train(link)
    if service_restarts:
        run.use(serve())
    before = dict(link.announced)
    link.kill_at = 0
    assert run.train(link) == 0
    assert link.trained == [1, 2, 3, 3, 4] and link.committed_steps == [2, 2, 4]
    assert {version: link.announced[version] for version in before} == before  # versions do not change
    uninterrupted, run.directory = FakeLink(), tmp_path / "uninterrupted"
    (run.directory / "run").mkdir(parents=True)
    assert run.train(uninterrupted) == 0
    expected, resumed = adapter(uninterrupted.announced[4]), adapter(link.announced[4])
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items())


def test_lost_answers_change_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = FakeLink()
    assert run.train(expected) == 0
    expected_adapter = adapter(expected.announced[4])
    request, sent = run.api.http.request, list[str]()

    def lossy(method: str, url: str, **options: Any) -> Any:
        answer = request(method, url, **options)
        sent.append(url)
        if len(sent) % 2:
            raise httpx.ReadError("the connection was reset")
        return answer

    monkeypatch.setattr(tinker_client, "RETRY_S", 0)
    monkeypatch.setattr(run.api.http, "request", lossy)
    run.directory = run.directory / "lossy"
    (run.directory / "run").mkdir(parents=True)
    link = FakeLink()
    assert run.train(link) == 0 and link.trained == [1, 2, 3, 4]
    assert all(torch.equal(tensor, expected_adapter[name]) for name, tensor in adapter(link.announced[4]).items())


def test_session_of_a_killed_trainer_ends(run: Run) -> None:
    with pytest.raises(Killed):
        run.train(FakeLink(kill_at=2))
    assert len(run.api.service._runs) == 1
    link = FakeLink()
    run.train(link)
    assert run.api.service._runs == {}


def test_checkpoint_that_the_service_lost_is_set_aside(run: Run) -> None:
    run.recipe = run.recipe.model_copy(update={"checkpoint": run.recipe.checkpoint.model_copy(update={"keep": 2})})
    assert run.train(FakeLink()) == 0
    client = TinkerClient(run.api.http)
    client.delete(next(str(each["tinker_path"]) for each in client.checkpoints() if "step_000004" in str(each)))
    link = FakeLink()
    assert run.train(link) == 0
    assert link.trained == [3, 4]
    assert list((run.directory / "run" / "checkpoints").glob("step_000004.damaged-1"))


def test_interrupt_commits_the_current_step(run: Run) -> None:
    link = FakeLink()
    assert run.train(link, interrupted=lambda: len(link.trained) == 3) == exit_codes.CHECKPOINTED
    assert checkpoints.committed(run.directory / "run") == [3]


def test_ended_session_ends_the_trainer(run: Run) -> None:
    link = FakeLink()

    def ending() -> bool:
        if link.trained == [1]:
            for session in {name.partition(":")[0] for name in run.api.service._runs}:
                TinkerClient(run.api.http).finish(session)
        return False

    with pytest.raises(MissingError, match=r"session_id|model_id"):
        run.train(link, interrupted=ending)
    assert link.trained == [1]


def test_another_model_is_refused(run: Run) -> None:
    run.recipe = run.recipe.model_copy(update={"model": run.recipe.model.model_copy(update={"path": "/other"})})
    with pytest.raises(ValueError, match=r"model\.path = /other: the Tinker service has"):
        run.train(FakeLink())

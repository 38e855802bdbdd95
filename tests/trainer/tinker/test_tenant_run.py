"""A tenant's run on the command line, with a service in this process and a fake engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml

from primeslurm.api.runs.run import Run
from primeslurm.records.events.training import OrchestratorDone
from primeslurm.run.history import events, rows
from primeslurm.run.status.run_status import RunStatus
from primeslurm.run.tenants import user_of
from primeslurm.tinker.backbone import Backbone
from primeslurm.tinker.routes import application
from primeslurm.tinker.sampler import TrainerSampler
from primeslurm.tinker.server import TinkerServer, prepare
from primeslurm.tinker.service import Answer, Service
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport import secret
from scripts.models.tiny_model import write_model
from tests.support.cli import run_python
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.waiting import wait_until

STEPS = 40


@pytest.fixture
def service(world: World, tmp_path: Path) -> Iterator[TinkerServer]:
    write_model(tmp_path / "model", "qwen3", hidden=32)
    write_tokenizer(tmp_path / "model")
    prepared, backbone = prepare("127.0.0.1", 0, tmp_path / "tinker"), Backbone(str(tmp_path / "model"), 8, world)
    service = Service(prepared.store, backbone, TrainerSampler(backbone))
    users = {key: user for user, key in prepared.keys.items()}
    server = uvicorn.Server(uvicorn.Config(application(service, users), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [prepared.listener]})
    thread.start()
    yield prepared
    server.should_exit = True
    thread.join()
    service.close()


def test_run_completes_although_its_trainer_is_killed(
    service: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is killed amid the run, and again after its last step, when the orchestrator has ended."""
    end_session, killed_at_end = Service.end_session, []

    async def kill_at_end(self: Service, session: str, reason: str) -> Answer:
        if checkpoints.newest(run.path) == STEPS and not killed_at_end:
            killed_at_end.append(trainer())
            await asyncio.to_thread(
                wait_until, lambda: [e for e in events(run.directory) if isinstance(e, OrchestratorDone)]
            )
            os.kill(killed_at_end[0], signal.SIGKILL)
        return await end_session(self, session, reason)

    monkeypatch.setattr(Service, "end_session", kill_at_end)
    with FakeEngine(tmp_path / "model") as engine:
        engine.version = 0
        recipe: dict[str, Any] = {
            "name": "tenant",
            "max_steps": STEPS,  # so that the trainer is killed long before the last one
            "seq_len": 64,
            "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
            "environments": [{"id": "reverse-text"}],
            # Later steps need rollouts of later versions.
            "orchestrator": {"batch_size": 8, "group_size": 4, "max_inflight_rollouts": 8, "max_off_policy_steps": 1},
            "trainer": {"lora": {"rank": 8}},
            "checkpoint": {"interval": 2},
            "tenant": {"service": service.url, "router": engine.url, "adapters": str(tmp_path / "tinker/checkpoints")},
        }
        (tmp_path / "tenant.yaml").write_text(yaml.safe_dump(recipe))
        secret.create(tmp_path)
        (tmp_path / "keys").mkdir()
        (tmp_path / "keys" / user_of("tenant")).write_text(service.keys["default"])
        keys = [service.keys["default"], secret.read(tmp_path)]
        words = ("-m", "primeslurm", "submit", tmp_path / "tenant.yaml", "--local", "--json")
        submitted = run_python(*words, cwd=tmp_path)
        assert submitted.code == 0, submitted.err
        run = Run(Path(json.loads(submitted.out)["directory"]))

        def trainer() -> int:
            status = looked()
            return next((p.pid or 0 for p in status.processes if p.name == "trainer-rank-0" and status.step), 0)

        def looked() -> RunStatus:
            status = run.status(processes=True, if_silent=lambda _: None)
            assert status.phase not in ("failed", "lost"), status
            return status

        os.kill(wait_until(trainer), signal.SIGKILL)
        wait_until(lambda: looked().phase == "completed", poll_s=0.5)
    assert len(killed_at_end) == 1 and len(run.directory.attempts()) == 1
    assert [row["step"] for row in rows(run.path)] == list(range(1, STEPS + 1))
    models = {body["model"] for body in engine.requests}
    assert "policy" in models and any("/external_weights/v" in model for model in models)
    assert {headers["Authorization"] for headers in engine.headers} == {f"Bearer {keys[1]}"}
    contents = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert not [content for content in contents for key in keys if key.encode() in content]

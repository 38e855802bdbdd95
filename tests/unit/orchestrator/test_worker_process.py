"""An environment worker as its agent starts it: its imports, its node, and the containers that it removes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.runtimes import ApptainerConfig, PodmanConfig, make_runtime

from primeslurm.node.agent.node_agent import AgentTimings
from primeslurm.orchestrator.environments.sandbox import containers
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.worker import main
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.transport import secret
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.verifiers_restored import restored
from tests.support.worker_pools import CallbackPool

PATIENCE_S = 280.0


PROGRAM = """
import sys
import primeslurm.orchestrator.worker.preload
import huggingface_hub.constants
print(huggingface_hub.constants.HF_HUB_OFFLINE, sorted({"torch", "verifiers.v1", "renderers"} - sys.modules.keys()))
"""


def test_preload_sets_the_hub_offline() -> None:
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"


PATIENT = "from primeslurm.orchestrator.worker import main; main.EXIT_S = 250; main.main()"
"""Runs a worker with a long exit timeout, because the test must pass on slow machines."""
HARBOR = Path(__file__).parents[3] / "examples" / "harbor"
MINE = {"verifiers.run": "run-1", "primeslurm.worker": "harbor-local-0"}
STAND_IN = (
    f"#!{sys.executable} -IS"
    + '''
"""A stand-in for docker and apptainer in tests: a container is a file with its labels. Looked at, it never answers."""
import json, os, pathlib, sys, time
at = pathlib.Path(__file__).parent
(at / "containers").mkdir(exist_ok=True)
words = sys.argv[1:]
with (at / "asked").open("a") as asked:
    print(json.dumps([pathlib.Path(__file__).name, *words]), file=asked)
def after(option):
    return [value for name, value in zip(words, words[1:]) if name == option]
if words[0] == "run":
    (name,) = after("--name")
    (at / "containers" / name).write_text(json.dumps(dict(label.split("=", 1) for label in after("--label"))))
    print(name)
elif words[0] == "ps":
    wanted = dict(label.removeprefix("label=").split("=", 1) for label in after("--filter"))
    for path in (at / "containers").iterdir():
        if wanted.items() <= json.loads(path.read_text()).items():
            print(path.name)
elif words[0] == "rm":
    for name in words[2:]:
        (at / "containers" / name).unlink()
elif words[0] == "inspect":
    caller = os.getppid()
    while os.getppid() == caller:  # it may be killed
        time.sleep(0.1)
'''
)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of stand-ins for docker and apptainer, first on PATH."""
    directory = tmp_path / "stand-ins-for-containers"
    (directory / "containers").mkdir(parents=True)
    for name in ("docker", "podman", "apptainer"):
        (directory / name).write_text(STAND_IN)
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("VF_RUN_ID", MINE["verifiers.run"])
    return directory


def leave(stand_in: Path, name: str, labels: dict[str, str]) -> None:
    (stand_in / "containers" / name).write_text(json.dumps(labels))


def there(stand_in: Path) -> set[str]:
    return {path.name for path in (stand_in / "containers").iterdir()}


def asked(stand_in: Path) -> list[list[str]]:
    return [json.loads(line) for line in (stand_in / "asked").read_text().splitlines()]


class WorkerProcess:
    """A worker's process, and the orchestrator's end of its messages."""

    def __init__(self, tmp_path: Path, environment: dict[str, Any], *argv: str) -> None:
        self.tmp_path = tmp_path
        self.attempt = tmp_path / "run" / "attempts" / "1"
        self.attempt.mkdir(parents=True)
        self.set_addresses({"hosts": {}, "ports": {}})
        model = write_tokenizer(tmp_path / "model")
        recipe = {"schema": 1, "name": "r", "seq_len": 64, "model": {"path": str(model)}, "environments": [environment]}
        (tmp_path / "recipe.json").write_text(Recipe.model_validate(recipe).model_dump_json(by_alias=True))
        self.argv = ["--recipe", tmp_path / "recipe.json", "--environment", environment["id"], *argv]
        self.argv += ["--orchestrator", f"ipc://{tmp_path}/envs", "--attempt-dir", self.attempt]
        self.results: list[object] = []
        taken = (lambda _, outcome: self.results.append(outcome), self.results.append)
        self.pool = CallbackPool(f"ipc://{tmp_path}/envs", *taken, lambda *why: self.results.append(why))

    def set_addresses(self, addresses: dict[str, Any]) -> None:
        (self.attempt / "addresses.json").write_text(json.dumps(addresses))

    @contextlib.asynccontextmanager
    async def pool_serves(self) -> AsyncIterator[None]:
        serving = asyncio.create_task(self.pool.serve())
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[subprocess.Popen[bytes]]:
        base = {name: value for name, value in os.environ.items() if name != secret.VARIABLE}
        with secret.handing_over(secret.own_secret()) as (descriptor, told):
            process = subprocess.Popen(
                [sys.executable, "-c", PATIENT, *map(str, self.argv)],
                env={**base, **told, "TMPDIR": str(self.tmp_path)},
                pass_fds=(descriptor,),
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    async def until(self, done: Callable[[], object]) -> None:
        while not done():
            assert not self.results
            await asyncio.sleep(0.05)


async def test_worker_reports_its_node_and_clears_its_scratch_directory(tmp_path: Path) -> None:
    old = tmp_path / "environments" / "reverse-text-3"
    for name in (old / "workdir", tmp_path / "environments" / "reverse-text-4"):
        name.mkdir(parents=True)
    worker = WorkerProcess(tmp_path, {"id": "reverse-text", "workers": 5}, "--worker", "3", "--node", "7")
    with FakeEngine(tmp_path / "model") as engine:
        engine.version = 0
        host, port = engine.url.removeprefix("http://").split(":")
        worker.set_addresses({"hosts": {"router-0": host}, "ports": {"router-0": {"http": int(port)}}})
        async with worker.pool_serves(), worker.started():
            await worker.until(lambda: worker.pool.available)
            assert worker.pool._nodes.keys() == {"7"} and worker.pool._live.keys() == {("reverse-text", 3)}
            assert not (old / "workdir").exists() and (tmp_path / "environments" / "reverse-text-4").is_dir()
            await worker.pool.send(Job("j", "g", "reverse-text", 0, 0, "router-0", "x.1:0"))
            while not worker.results:
                await asyncio.sleep(0.05)
    ((rollout,),) = worker.results
    assert isinstance(rollout, Rollout) and rollout.info.environment == "reverse-text"
    assert [path.name for path in worker.attempt.iterdir()] == ["addresses.json"], "nothing on the shared file system"


async def test_ended_worker_removes_only_its_own_containers(tmp_path: Path, stand_in: Path) -> None:
    leave(stand_in, "of-a-killed-one", MINE)
    others = {
        "of-another-run": MINE | {"verifiers.run": "run-2"},
        "of-another-worker": MINE | {"primeslurm.worker": "harbor-local-1"},
        "somebody-else's": {},
    }
    for name, labels in others.items():
        leave(stand_in, name, labels)
    environment = {"id": "harbor-local", "args": {"path": str(HARBOR)}, "harness": {"id": "bash"}}
    worker = WorkerProcess(
        tmp_path, environment | {"runtime": {"type": "docker", "image": "an-image"}}, "--worker", "0"
    )
    async with worker.pool_serves():
        async with worker.started() as process:
            await worker.until(lambda: worker.pool.available)
            assert there(stand_in) == set(others), "what an earlier one had left is gone"
            await worker.pool.send(Job("j", "g", "harbor-local", 0, 0, "router-0", "x.1:0"))
            await worker.until(lambda: there(stand_in) - set(others))
            (own,) = there(stand_in) - set(others)
            assert json.loads((stand_in / "containers" / own).read_text()) == MINE
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 128 + signal.SIGTERM
        assert there(stand_in) == set(others)
        async with worker.started() as process:
            while worker.results != ["j"]:  # what the first one ran is lost
                await asyncio.sleep(0.05)
            worker.results.clear()
            await worker.pool.send(Job("k", "g", "harbor-local", 0, 0, "router-0", "x.1:0"))
            await worker.until(lambda: there(stand_in) - set(others))
            (second,) = there(stand_in) - set(others)
            process.kill()
            process.wait()
        assert there(stand_in) == {*others, second}, "nobody has removed it"
        async with worker.started():
            while second in there(stand_in):
                await asyncio.sleep(0.05)
    removed = [word for words in asked(stand_in) if words[1] == "rm" for word in words[3:]]
    assert removed[:3] == ["of-a-killed-one", own, second] and not set(removed) & set(others)


def test_exit_timeout_is_shorter_than_the_agents() -> None:
    assert AgentTimings().term_grace_s > main.EXIT_S


def test_podman_uses_labels_and_apptainer_names(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with restored(monkeypatch):
        containers.patch_runtimes(MINE["primeslurm.worker"])
        labels = make_runtime(PodmanConfig())._label_args
        name = make_runtime(ApptainerConfig())._instance
        containers.patch_runtimes("harbor-local-1")
        other = make_runtime(ApptainerConfig())._instance
    assert labels == [word for label, value in MINE.items() for word in ("--label", f"{label}={value}")]
    containers.remove_stale(("subprocess", "podman", "apptainer", "modal"), MINE["primeslurm.worker"])
    looked, stopped = asked(stand_in)
    assert looked[:2] == ["podman", "ps"] and stopped[:4] == ["apptainer", "instance", "stop", "--force"]
    start = stopped[-1].removesuffix("*")
    assert name.startswith(start) and not other.startswith(start)

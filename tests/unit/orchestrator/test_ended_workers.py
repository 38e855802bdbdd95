"""A worker removes its containers after SIGTERM, and after SIGKILL when it starts again."""

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

import pytest
from verifiers.v1.runtimes import ApptainerConfig, PodmanConfig, make_runtime

from primeslurm.node.agent.node_agent import AgentTimings
from primeslurm.orchestrator.environments.sandbox import containers
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.worker import main
from primeslurm.recipe import Recipe
from primeslurm.testbed.fakes.fake_engine import write_tokenizer
from primeslurm.wire.transport import secret
from tests.support.verifiers_restored import restored
from tests.support.worker_pools import CallbackPool

PATIENCE_S = 280.0
PATIENT = "from primeslurm.orchestrator.worker import main; main.EXIT_S = 250; main.main()"
"""Runs a worker with a long exit timeout, because the test must pass on slow machines."""
HARBOR = Path(__file__).parents[3] / "examples" / "harbor"
MINE = {"verifiers.run": "run-1", "primeslurm.worker": "harbor-local-0"}
STAND_IN = (
    f"#!{sys.executable} -IS"
    + '''
"""A stand-in for docker and apptainer in tests: a container is a file with its labels. Looked at, it never answers."""
import fnmatch, json, pathlib, sys, time
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
    time.sleep(1000)
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


class Started:
    """A worker's process, and the orchestrator's end of what it says."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        attempt = tmp_path / "run" / "attempts" / "1"
        attempt.mkdir(parents=True)
        (attempt / "addresses.json").write_text(json.dumps({"hosts": {}, "ports": {}}))
        model = write_tokenizer(tmp_path / "model")
        asked = {"id": "harbor-local", "args": {"path": str(HARBOR)}, "harness": {"id": "bash"}}
        fields = {"schema": 1, "name": "r", "seq_len": 64, "model": {"path": str(model)}}
        fields["environments"] = [{**asked, "runtime": {"type": "docker", "image": "an-image"}}]
        (tmp_path / "recipe.json").write_text(Recipe.model_validate(fields).model_dump_json(by_alias=True))
        self.argv = ["--recipe", tmp_path / "recipe.json", "--environment", "harbor-local", "--worker", "0"]
        self.argv += ["--orchestrator", f"ipc://{tmp_path}/envs", "--attempt-dir", attempt]
        self.results: list[object] = []
        taken = (lambda _, outcome: self.results.append(outcome), self.results.append)
        self.pool = CallbackPool(f"ipc://{tmp_path}/envs", *taken, lambda *why: self.results.append(why))

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncIterator[subprocess.Popen[bytes]]:
        base = {name: value for name, value in os.environ.items() if name != secret.VARIABLE}
        with secret.handing_over(secret.own()) as (descriptor, told):
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


async def test_ended_worker_removes_only_its_own_containers(tmp_path: Path, stand_in: Path) -> None:
    leave(stand_in, "of-a-killed-one", MINE)
    others = {
        "of-another-run": MINE | {"verifiers.run": "run-2"},
        "of-another-worker": MINE | {"primeslurm.worker": "harbor-local-1"},
        "somebody-else's": {},
    }
    for name, labels in others.items():
        leave(stand_in, name, labels)
    started = Started(tmp_path)
    serving = asyncio.create_task(started.pool.serve())
    try:
        async with asyncio.timeout(PATIENCE_S):
            async with started.process() as process:
                await started.until(lambda: started.pool.available)
                assert there(stand_in) == set(others), "what an earlier one had left is gone"
                await started.pool.send(Job("j", "g", "harbor-local", 0, 0, "router-0", "x.1:0"))
                await started.until(lambda: there(stand_in) - set(others))
                (own,) = there(stand_in) - set(others)
                assert json.loads((stand_in / "containers" / own).read_text()) == MINE
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait) == 128 + signal.SIGTERM
            assert there(stand_in) == set(others)
            async with started.process() as process:
                while started.results != ["j"]:  # what the first one ran is lost
                    await asyncio.sleep(0.05)
                started.results.clear()
                await started.pool.send(Job("k", "g", "harbor-local", 0, 0, "router-0", "x.1:0"))
                await started.until(lambda: there(stand_in) - set(others))
                (second,) = there(stand_in) - set(others)
                process.kill()
                process.wait()
            assert there(stand_in) == {*others, second}, "nobody has removed it"
            async with started.process():
                while second in there(stand_in):
                    await asyncio.sleep(0.05)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
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

"""Tasks in real containers: `primeslurm images` builds a Dockerfile, and rollouts run in the image."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from primeslurm.orchestrator.environments.sandbox import containers, uv_scripts
from primeslurm.recipe.sections.sandboxes import Limits
from tests.support import docker_daemon, small_images
from tests.support.cli import run_python
from tests.support.scripted_engine import ScriptedEngine, tool_call
from tests.support.verifiers_restored import restored
from tests.unit.orchestrator import test_harbor

model = test_harbor.model
LOOK = "grep -c SECRET /proc/self/environ; pwd"
QUOTA = "cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null"  # of either version of cgroups
LINKS = "sed 1,2d /proc/net/dev | cut -d: -f1"
TAKE = "python3 -c \"b'x' * 600_000_000\"; echo ended with $?"


@pytest.fixture(scope="module")
def daemon() -> Iterator[str]:
    if why := docker_daemon.lacking():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="d-") as directory, docker_daemon.running(Path(directory)) as address:
        yield address


@pytest.fixture
def docker(daemon: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if why := small_images.lacking():
        pytest.skip(why)
    monkeypatch.setenv("DOCKER_HOST", daemon)
    with restored(monkeypatch):
        yield
    left = subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True).stdout
    assert left == "", "containers were left"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A directory with one task that has a Dockerfile."""
    task = tmp_path / "tasks" / "wrong-total"
    shutil.copytree(test_harbor.EXAMPLES / "wrong-total", task)
    about = (task / "task.toml").read_text()
    (task / "task.toml").write_text(about.replace('workdir = "/app"\n', ""))
    small_images.make_context(task / "environment")
    with (task / "environment" / "Dockerfile").open("a") as file:
        file.write("COPY total.py /testbed/\n")
    return task.parent


async def played(
    tasks: Path, model: str, commands: list[str], tmp_path: Path, **runtime: Any
) -> tuple[float | None, list[str]]:
    """Run a rollout whose model sends one command per turn. Return its reward, and the output of each command."""
    settings = {"limits": {"wall_time_s": 300}, **runtime, "install": False}
    made = test_harbor.recipe(model, "bash", args={"path": str(tasks)}, runtime=settings)
    containers.patch_runtimes(
        "tasks-0", uv_scripts.environment_directories(), Limits.model_validate(settings["limits"])
    )
    script = [*(tool_call("bash", command=command) for command in commands), "Done."]
    with ScriptedEngine(Path(model), script) as engine:
        engine.version = 3
        (rollout,) = await test_harbor.played(made, engine, tmp_path)
    outputs = engine.prompts[-1].split("<tool_response>")[1:]
    return rollout.info.reward, [each.partition("</tool_response>")[0] for each in outputs]


@pytest.mark.usefixtures("docker")
async def test_docker_builds_a_task_and_enforces_limits(tasks: Path, model: str, tmp_path: Path) -> None:
    words = ("-m", "primeslurm", "images", tasks, "--runtime", "docker")
    built = run_python(*words, cwd=tmp_path)
    assert built.code == 0, built.err
    assert built.out.startswith("localhost/primeslurm-tasks:") and built.out.endswith("  wrong-total\n")
    assert "0 built, 1 there already" in run_python(*words, cwd=tmp_path).err
    limits = {"memory_gb": 0.3, "cpus": 1, "wall_time_s": 300}
    commands = [LOOK, TAKE, QUOTA, test_harbor.SOLUTION]
    reward, outputs = await played(tasks, model, commands, tmp_path, type="docker", limits=limits)
    assert reward == 1.0
    assert outputs[0].split() == ["0", "/testbed"] and "ended with 137" in outputs[1], outputs
    assert outputs[2].split()[0] == "100000", "one CPU: 100 ms of each period of 100 ms"
    subprocess.run(["docker", "rmi", "--force", built.out.split()[0]], check=True, capture_output=True)
    assert "1 built, 0 there already" in run_python(*words, cwd=tmp_path).err


@pytest.mark.usefixtures("docker")
async def test_apptainer_runs_the_converted_image_without_network(
    tasks: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed")
    monkeypatch.setenv("APPTAINER_USERNS", "1")
    monkeypatch.setenv(
        "APPTAINER_NO_PRIVS", "1"
    )  # root in the container needs capabilities that root of some hosts lacks
    built = run_python("-m", "primeslurm", "images", tasks, cwd=tmp_path)
    assert built.code == 0, built.err
    (sif,) = tasks.glob(".images/*.sif")
    assert built.out == f"{sif}  wrong-total\n"
    images = subprocess.run(["docker", "images", "--quiet", "localhost/*"], capture_output=True, text=True, check=True)
    assert images.stdout == "", "docker keeps an unused image"
    limits = {"network": "none", "wall_time_s": 300}
    commands = [LOOK, LINKS, test_harbor.SOLUTION]
    reward, outputs = await played(tasks, model, commands, tmp_path, type="apptainer", limits=limits)
    assert (reward, outputs[0].split()) == (1.0, ["0", "/testbed"])
    assert outputs[1].split() == ["lo"], "it has the host's network"

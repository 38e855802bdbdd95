"""A Harbor task, solved by mini-swe-agent in a sandbox, with a model that plays a recorded solution."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from uv_scripts.models import tiny_model

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import agents, host_needs
from primeslurm.orchestrator.environments.sandbox import uv_scripts
from primeslurm.orchestrator.environments.sandbox.install import install
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.worker.main import Worker
from primeslurm.orchestrator.worker.token_client import TokenClient, serving
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.sandboxes import Harness
from primeslurm.testbed.fakes.scripted_engine import ScriptedEngine, tool_call
from primeslurm.wire.batches.rollouts import Rollout
from primeslurm.wire.stored import task_images
from primeslurm.wire.transport.addresses import AddressBook
from tests.support.verifiers_restored import restored

EXAMPLES = Path(__file__).parents[3] / "examples" / "harbor"
ROUTER = "router-0"
DONE = tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
SOLUTION = (EXAMPLES / "wrong-total/solution/solve.sh").read_text().splitlines()[-1]


@pytest.fixture(autouse=True)
def _verifiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with restored(monkeypatch):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tokenizer whose messages are rendered as Qwen3's."""
    directory = tmp_path_factory.mktemp("model")
    tiny_model.tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return str(directory)


def recipe(model: str, harness: str, **environment: Any) -> Recipe:
    runtime = {"type": "subprocess", "limits": {"memory_gb": 2, "disk_gb": 0.2, "wall_time_s": 300}}
    asked = {"id": "harbor-local", "args": {"path": str(EXAMPLES)}, "harness": {"id": harness}, "runtime": runtime}
    fields: dict[str, Any] = {"name": "test", "max_steps": 5, "seq_len": 65536, "model": {"path": model}}
    fields["orchestrator"] = {"batch_size": 8, "group_size": 4, "request_timeout_s": 60}
    return Recipe.model_validate({**fields, "environments": [{**asked, **environment}]})


async def played(made: Recipe, engine: ScriptedEngine, tmp_path: Path) -> tuple[Rollout, ...]:
    """One rollout of a worker, as `worker.main` sets it up."""
    (environment,) = made.environments
    install(environment.runtime, tmp_path / "files", tmp_path / "containers", [])
    worker = Worker(made, environment, 0, "inproc://nobody", AddressBook(Path("/nowhere")), Path("/nowhere"))
    async with serving(worker._env) as clients:
        client = TokenClient(ROUTER, lambda: engine.url, made.model.path, made.max_len, 60)
        worker._clients[ROUTER] = clients[client.key] = client
        return await worker._rollout(Job("j", "g", environment.label, 0, 3, ROUTER, "run.1:3"))


@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        pytest.param((SOLUTION,), 1.0, id="solved"),
        pytest.param(("python3 total.py 4",), 0.5, id="looked-at"),
    ],
)
async def test_mini_swe_agent_solves_a_task_in_a_sandbox(
    model: str, commands: tuple[str, ...], reward: float, tmp_path: Path
) -> None:
    with ScriptedEngine(Path(model), [*(tool_call("bash", command=line) for line in commands), DONE]) as engine:
        engine.version = 3
        found = await played(recipe(model, "mini_swe_agent"), engine, tmp_path)
    (rollout,) = found
    assert rollout.info.reward == reward
    assert rollout.info.turns == len(engine.requests) == 2
    assert "total.py` in the working directory prints the sum" in engine.prompts[0]
    assert "<tool_response>" in engine.prompts[1]
    assert sum(rollout.mask) == sum(engine.sampled), "each sampled token is trained once"
    assert not list(tmp_path.rglob("*")), "the rollout left files"


def test_a_harness_without_its_packages_is_found_out_before_a_rollout(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, "mini_swe_agent").environments[0]
    env = environments.load(made.id, made.args, agents.agent_options(made))
    assert host_needs.needs(made, env) == host_needs.HostNeeds(("subprocess",), ("mini_swe_agent",))
    assert host_needs.unmet(made, env) == []
    uv_scripts.find_python.cache_clear()
    monkeypatch.setattr(uv_scripts, "_environments", lambda: (Path(sys.prefix),))
    (problem,) = host_needs.unmet(made, env)
    assert "mini-swe-agent==2.4.6" in problem.why and problem.fix == "primeslurm install --harness mini_swe_agent"
    uv_scripts.find_python.cache_clear()


def test_what_rollouts_install_into_containers_is_known_before_one_is(model: str) -> None:
    for runtime, harness, expected in (
        ({"type": "apptainer"}, "mini_swe_agent", ["apptainer"]),
        ({"type": "docker"}, "bash", ["docker"]),
        ({"type": "docker", "install": False}, "bash", []),
        ({"type": "subprocess"}, "mini_swe_agent", []),
        ({"type": "modal"}, "bash", []),
    ):
        made = recipe(model, harness, runtime=runtime).environments[0]
        env = environments.load(made.id, made.args, agents.agent_options(made))
        found = host_needs.notes(made, env)
        assert [each.value for each in found] == expected, runtime
        assert all(harness in each.why and "PyPI" in each.why for each in found)


def test_a_key_that_a_command_line_of_the_node_shows_is_noted(model: str) -> None:
    for runtime, search, expected in (
        ("subprocess", True, ["environments.harness.search"]),
        ("docker", True, ["environments.runtime", "environments.harness.search"]),
        ("subprocess", False, []),
        ("modal", True, []),
    ):
        (made,) = recipe(model, "bash", runtime={"type": runtime}).environments
        made = made.model_copy(update={"harness": Harness.model_validate({"id": "bash", "search": search})})
        env = environments.load(made.id, made.args, agents.agent_options(made))
        assert [each.field for each in host_needs.notes(made, env)] == expected, runtime


def test_a_container_that_nothing_is_installed_into_needs_the_packages_here(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, "mini_swe_agent", runtime={"type": "docker", "install": False}).environments[0]
    env = environments.load(made.id, made.args, agents.agent_options(made))
    assert host_needs.needs(made, env) == host_needs.HostNeeds(("docker",), ("mini_swe_agent",))
    monkeypatch.setattr(uv_scripts, "directories", lambda: (Path("/usr"), Path("/opt/python")))
    monkeypatch.setattr(host_needs, "_runtime", lambda *_: ())
    monkeypatch.setattr(host_needs, "_harness", lambda _: ())
    (problem,) = host_needs.unmet(made, env)
    assert (problem.field, problem.value) == ("environments.runtime.install", "false") and "/usr" in problem.why


def test_a_machine_without_bubblewrap_is_found_out_before_a_rollout(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, "bash").environments[0]
    env = environments.load(made.id, made.args, agents.agent_options(made))
    monkeypatch.setattr(host_needs, "_bubblewrap", lambda: "bubblewrap is not installed")
    (problem,) = host_needs.unmet(made, env)
    assert problem.why == "bubblewrap is not installed" and "trusted: true" in problem.fix


def test_what_runs_no_program_needs_nothing() -> None:
    made = Environment.model_validate({"id": "reverse-text"})
    env = environments.load(made.id, made.args, agents.agent_options(made))
    assert host_needs.needs(made, env) == host_needs.HostNeeds((), ())


def test_what_needs_a_container_gets_apptainer_unless_the_recipe_says_otherwise(model: str) -> None:
    made = recipe(model, "mini_swe_agent", runtime=None).environments[0]
    env = environments.load(made.id, made.args, agents.agent_options(made))
    assert host_needs.needs(made, env).runtimes == ("apptainer",)
    with_image = {
        "type": "apptainer",
        "image": "python:3.12",
        "limits": {"cpus": 2, "memory_gb": 3},
        "secrets": ["TOKEN"],
    }
    made = recipe(model, "claude_code", runtime=with_image).environments[0]
    env = environments.load(made.id, made.args, agents.agent_options(made))
    (spec,) = env._agent_specs.values()
    runtime = spec.runtime
    assert (runtime.type, runtime.image, runtime.cpu, runtime.memory) == ("apptainer", "python:3.12", 2, 3)
    assert spec.harness.forward_env == ["TOKEN"] and spec.timeout.rollout == spec.timeout.scoring == 3600


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("[environment]\nhealthcheck = {command = 'true'}", "healthcheck is not done"),
        ("[[verifier.collect]]\ncommand = 'pg_dump db > /app/db.sql'", r"\[\[verifier.collect\]\] is not done"),
        ("artifacts = ['/app/db.sql']", "artifacts are not done"),
        ("[[steps]]\nname = 'one'", "several steps"),
        ("[environment]\nenv = {KEY = '${OPENAI_API_KEY}'}", "which is not in `variables`"),
        ("[verifier]\nenvironment_mode = 'separate'", "separate environment"),
        ("[environment]\nmemory = '2 gigs'", r"\[environment\] memory = '2 gigs' is not a size"),
        ("[environment]\nstorage = 2048", "storage = 2048 is not a size"),
        ("[environment]\nmemory_mb = '2G'", r"one: \[environment\] memory_mb = '2G' is not a number above 0"),
        ("[environment]\ncpus = -1", "cpus = -1 is not a number"),
        ("[environment", "Expected"),
    ],
)
def test_tasks_that_cannot_be_run_are_named_at_once(change: str, words: str, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests/test.sh").touch()
        (tmp_path / name / "instruction.md").touch()
        (tmp_path / name / "task.toml").write_text(change)
    env = environments.load("harbor-local", {"path": str(tmp_path)})
    with pytest.raises(ValueError, match=words) as raised:
        list(env.taskset.load())
    assert "one: " in str(raised.value) and "other: " in str(raised.value)


@pytest.mark.parametrize(
    ("said", "memory", "disk"),
    [
        ("memory_mb = 2048\nstorage_mb = 512", 2, 0.5),
        ("memory = '2G'\nstorage = '512M'", 2, 0.5),
        ("memory = ' 1.5g '\nstorage = '1048576K'", 1.5, 1),
        ("memory = '2G'\nmemory_mb = 4096", 2, None),
        ("cpus = 2", None, None),
    ],
)
def test_sizes_are_numbers_of_mebibytes_or_have_a_unit(
    said: str, memory: float | None, disk: float | None, tmp_path: Path
) -> None:
    (tmp_path / "one/tests").mkdir(parents=True)
    for name in ("tests/test.sh", "instruction.md"):
        (tmp_path / "one" / name).touch()
    (tmp_path / "one/task.toml").write_text(f"[environment]\n{said}")
    (task,) = environments.load("harbor-local", {"path": str(tmp_path)}).taskset.load()
    assert (task.data.resources.memory, task.data.resources.disk) == (memory, disk)


@pytest.fixture
def with_dockerfile(tmp_path: Path) -> Path:
    """A task whose environment is a Dockerfile alone."""
    task = tmp_path / "tasks" / "built"
    (task / "environment").mkdir(parents=True)
    (task / "tests").mkdir()
    for name in ("environment/Dockerfile", "environment/data", "tests/test.sh", "instruction.md", "task.toml"):
        (task / name).touch()
    return task


def test_a_dockerfile_is_not_passed_over(with_dockerfile: Path) -> None:
    tasks = str(with_dockerfile.parent)
    for runtime, words in (
        ("apptainer", f"built: environment/Dockerfile is not built for apptainer: `primeslurm images {tasks}` does"),
        ("podman", f"`primeslurm images {tasks} --runtime podman --images /other` does that"),
        ("subprocess", "built: environment/Dockerfile needs a container"),
    ):
        more = {"images": "/other"} if runtime == "podman" else {}
        env = environments.load("harbor-local", {"path": tasks, **more}, {"runtime": {"type": runtime}})
        with pytest.raises(ValueError, match=re.escape(words)):
            list(env.taskset.load())
    env = environments.load("harbor-local", {"path": tasks, "ignore_dockerfile": True})
    (task,) = env.taskset.load()
    assert task.data.image is None and task.data.upload_environment


@pytest.mark.parametrize("runtime", ["apptainer", "docker"])
@pytest.mark.parametrize("said", [None, "/said"])
def test_a_task_runs_in_the_image_that_was_built_for_its_runtime(
    runtime: str, said: str | None, with_dockerfile: Path
) -> None:
    tasks, environment = with_dockerfile.parent, with_dockerfile / "environment"
    if said:
        (with_dockerfile / "task.toml").write_text(f"[environment]\nworkdir = '{said}'")
    images, digest = task_images.image_directory(tasks), task_images.environment_digest(environment)
    images.mkdir()
    for kind in task_images.RUNTIMES:
        task_images.note_built(images, digest, kind, f"/from-{kind}")
    sif = images / f"{digest}.sif"
    sif.touch()
    env = environments.load("harbor-local", {"path": str(tasks)}, {"runtime": {"type": runtime}})
    (task,) = env.taskset.load()
    assert task.data.image == (str(sif) if runtime == "apptainer" else f"localhost/primeslurm-tasks:{digest}")
    assert task.data.workdir == (said or f"/from-{runtime}")
    assert not task.data.upload_environment, "the image has them"
    (environment / "data").chmod(0o755)
    with pytest.raises(ValueError, match="is not built"):
        list(env.taskset.load())


@pytest.mark.parametrize(("runtime", "is_file"), [("apptainer", True), ("docker", False)])
def test_an_image_of_a_registry_is_replaced_by_its_file(runtime: str, is_file: bool, with_dockerfile: Path) -> None:
    (with_dockerfile / "task.toml").write_text("[environment]\ndocker_image = 'python:3.12'")
    tasks = with_dockerfile.parent
    env = environments.load("harbor-local", {"path": str(tasks)}, {"runtime": {"type": runtime}})
    assert [task.data.image for task in env.taskset.load()] == ["python:3.12"]
    images, digest = task_images.image_directory(tasks), task_images.pulled_digest("python:3.12")
    images.mkdir()
    task_images.note_built(images, digest, "apptainer", "")
    (images / f"{digest}.sif").touch()
    expected = str(images / f"{digest}.sif") if is_file else "python:3.12"
    assert [task.data.image for task in env.taskset.load()] == [expected]


def test_a_directory_without_tasks_is_said(tmp_path: Path) -> None:
    env = environments.load("harbor-local", {"path": str(tmp_path)})
    with pytest.raises(ValueError, match="there is no task"):
        list(env.taskset.load())
    with pytest.raises(UsageError, match="path"):
        environments.load("harbor-local", {})

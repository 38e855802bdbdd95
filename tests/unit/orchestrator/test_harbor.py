"""Harbor tasks: how they are read, what they need of a host, and whole rollouts with a recorded solution."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import checks
from primeslurm.orchestrator.environments.checks import HostNeeds
from primeslurm.orchestrator.environments.sandbox import uv_scripts
from primeslurm.orchestrator.environments.sandbox.install import install
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.sandboxes import Harness
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.stored import task_images
from scripts.models import tiny_model
from tests.support.rollouts import rollouts, small_recipe
from tests.support.scripted_engine import ScriptedEngine, tool_call
from tests.support.verifiers_restored import restored

EXAMPLES = Path(__file__).parents[3] / "examples" / "harbor"
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
    base = {"id": "harbor-local", "args": {"path": str(EXAMPLES)}, "harness": {"id": harness}, "runtime": runtime}
    return small_recipe(model, seq_len=65536, environments=[{**base, **environment}])


async def played(made: Recipe, engine: ScriptedEngine, tmp_path: Path) -> tuple[Rollout, ...]:
    """Run one rollout in a worker, set up as `worker.main` does it."""
    (environment,) = made.environments
    install(environment.runtime, tmp_path / "files", tmp_path / "containers", [])
    return await rollouts(engine, made)


@pytest.mark.parametrize(
    ("command", "reward"),
    [(SOLUTION, 1.0), pytest.param("python3 total.py 4", 0.5, marks=pytest.mark.campaign)],
    ids=["solved", "only looked"],
)
async def test_mini_swe_agent_solves_a_task_in_a_sandbox(
    model: str, command: str, reward: float, tmp_path: Path
) -> None:
    with ScriptedEngine(Path(model), [tool_call("bash", command=command), DONE]) as engine:
        engine.version = 3
        (rollout,) = await played(recipe(model, "mini_swe_agent"), engine, tmp_path)
    assert rollout.info.reward == reward
    assert rollout.info.turns == len(engine.requests) == 2
    assert "total.py` in the working directory prints the sum" in engine.prompts[0]
    assert "<tool_response>" in engine.prompts[1]
    assert sum(rollout.mask) == sum(engine.sampled), "each sampled token is trained once"
    assert not list(tmp_path.rglob("*")), "the rollout left files"


def test_harness_without_its_packages_is_reported_before_a_rollout(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(model, "mini_swe_agent").environments[0]
    env = environments.load_from_recipe(made)
    assert checks.needs(made, env) == HostNeeds(("subprocess",), ("mini_swe_agent",))
    assert checks.missing_needs(made, env) == []
    uv_scripts.find_python.cache_clear()
    monkeypatch.setattr(uv_scripts, "_environments", lambda: (Path(sys.prefix),))
    (problem,) = checks.missing_needs(made, env)
    assert "mini-swe-agent==2.4.6" in problem.why and problem.fix == "primeslurm install --harness mini_swe_agent"
    uv_scripts.find_python.cache_clear()


INSTALL, KEY = "environments.runtime", "environments.harness.search"


@pytest.mark.parametrize(
    ("runtime", "harness", "search", "fields"),
    [
        ({"type": "apptainer"}, "mini_swe_agent", False, [INSTALL]),
        ({"type": "docker"}, "bash", True, [INSTALL, KEY]),
        ({"type": "docker", "install": False}, "bash", False, []),
        ({"type": "subprocess"}, "mini_swe_agent", False, []),
        ({"type": "subprocess"}, "bash", True, [KEY]),
        ({"type": "modal"}, "bash", True, []),
    ],
)
def test_downloads_into_containers_and_visible_keys_are_noted(
    model: str, runtime: dict[str, Any], harness: str, search: bool, fields: list[str]
) -> None:
    (made,) = recipe(model, harness, runtime=runtime).environments
    if search:
        made = made.model_copy(update={"harness": Harness.model_validate({"id": harness, "search": search})})
    notes = checks.side_effects(made, environments.load_from_recipe(made))
    assert [note.field for note in notes] == fields
    assert all(harness in note.why for note in notes if note.field == INSTALL)


def test_container_with_install_false_needs_the_packages_on_the_host(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, "mini_swe_agent", runtime={"type": "docker", "install": False}).environments[0]
    env = environments.load_from_recipe(made)
    assert checks.needs(made, env) == HostNeeds(("docker",), ("mini_swe_agent",))
    monkeypatch.setattr(uv_scripts, "environment_directories", lambda: (Path("/usr"), Path("/opt/python")))
    (problem,) = [each for each in checks.missing_needs(made, env) if each.field == "environments.runtime.install"]
    assert problem.value == "false" and "/usr" in problem.why


def test_host_without_bubblewrap_is_reported_before_a_rollout(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(model, "bash").environments[0]
    monkeypatch.setattr(checks, "_bubblewrap_problem", lambda: "bubblewrap is not installed")
    (problem,) = checks.missing_needs(made, environments.load_from_recipe(made))
    assert problem.why == "bubblewrap is not installed" and "trusted: true" in problem.fix


def test_environment_without_programs_needs_nothing() -> None:
    made = Environment.model_validate({"id": "reverse-text"})
    assert checks.needs(made, environments.load_from_recipe(made)) == HostNeeds((), ())


def test_apptainer_is_the_default_of_a_harness_that_needs_a_container(model: str) -> None:
    made = recipe(model, "mini_swe_agent", runtime=None).environments[0]
    assert checks.needs(made, environments.load_from_recipe(made)).runtimes == ("apptainer",)


def test_image_limits_and_secrets_of_the_recipe_become_options_of_the_agent(model: str) -> None:
    limits = {"cpus": 2, "memory_gb": 3}
    with_image = {"type": "apptainer", "image": "python:3.12", "limits": limits, "secrets": ["TOKEN"]}
    made = recipe(model, "claude_code", runtime=with_image).environments[0]
    (spec,) = environments.load_from_recipe(made)._agent_specs.values()
    runtime = spec.runtime
    assert (runtime.type, runtime.image, runtime.cpu, runtime.memory) == ("apptainer", "python:3.12", 2, 3)
    assert spec.harness.forward_env == ["TOKEN"] and spec.timeout.rollout == spec.timeout.scoring == 3600


def write_task(directory: Path, toml: str = "", *more: str) -> Path:
    for name in ("tests/test.sh", "instruction.md", *more):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    (directory / "task.toml").write_text(toml)
    return directory


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("[environment]\nhealthcheck = {command = 'true'}", "healthcheck is not supported"),
        ("[[verifier.collect]]\ncommand = 'pg_dump db > /app/db.sql'", r"\[\[verifier.collect\]\] is not supported"),
        ("artifacts = ['/app/db.sql']", "artifacts are not supported"),
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
def test_all_tasks_that_cannot_run_are_named_in_one_error(toml: str, problem: str, tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_task(tmp_path / name, toml)
    env = environments.load("harbor-local", {"path": str(tmp_path)})
    with pytest.raises(ValueError, match=problem) as raised:
        list(env.taskset.load())
    assert "one: " in str(raised.value) and "other: " in str(raised.value)


@pytest.mark.parametrize(
    ("toml", "memory", "disk"),
    [
        ("memory_mb = 2048\nstorage_mb = 512", 2, 0.5),
        ("memory = '2G'\nstorage = '512M'", 2, 0.5),
        ("memory = ' 1.5g '\nstorage = '1048576K'", 1.5, 1),
        ("memory = '2G'\nmemory_mb = 4096", 2, None),
        ("cpus = 2", None, None),
    ],
)
def test_sizes_are_numbers_of_mebibytes_or_have_a_unit(
    toml: str, memory: float | None, disk: float | None, tmp_path: Path
) -> None:
    write_task(tmp_path / "one", f"[environment]\n{toml}")
    (task,) = environments.load("harbor-local", {"path": str(tmp_path)}).taskset.load()
    assert (task.data.resources.memory, task.data.resources.disk) == (memory, disk)


@pytest.fixture
def with_dockerfile(tmp_path: Path) -> Path:
    """A task whose environment is only a Dockerfile."""
    return write_task(tmp_path / "tasks" / "built", "", "environment/Dockerfile", "environment/data")


@pytest.mark.parametrize(
    ("runtime", "more", "message"),
    [
        ("apptainer", {}, "built: environment/Dockerfile is not built for apptainer: `primeslurm images {}` does"),
        ("podman", {"images": "/other"}, "`primeslurm images {} --runtime podman --images /other` does that"),
        ("subprocess", {}, "built: environment/Dockerfile needs a container"),
    ],
)
def test_task_whose_dockerfile_is_not_built_is_refused(
    runtime: str, more: dict[str, str], message: str, with_dockerfile: Path
) -> None:
    tasks = str(with_dockerfile.parent)
    env = environments.load("harbor-local", {"path": tasks, **more}, {"runtime": {"type": runtime}})
    with pytest.raises(ValueError, match=re.escape(message.format(tasks))):
        list(env.taskset.load())


def test_ignored_dockerfile_leaves_the_files_to_upload(with_dockerfile: Path) -> None:
    args = {"path": str(with_dockerfile.parent), "ignore_dockerfile": True}
    (task,) = environments.load("harbor-local", args).taskset.load()
    assert task.data.image is None and task.data.upload_environment


@pytest.mark.parametrize("runtime", ["apptainer", "docker"])
@pytest.mark.parametrize("workdir", [None, "/of-the-task"])
def test_task_runs_in_the_image_that_was_built_for_its_runtime(
    runtime: str, workdir: str | None, with_dockerfile: Path
) -> None:
    tasks, environment = with_dockerfile.parent, with_dockerfile / "environment"
    if workdir:
        (with_dockerfile / "task.toml").write_text(f"[environment]\nworkdir = '{workdir}'")
    images, digest = task_images.image_directory(tasks), task_images.environment_digest(environment)
    images.mkdir()
    for kind in task_images.RUNTIMES:
        task_images.note_built(images, digest, kind, f"/from-{kind}")
    sif = images / f"{digest}.sif"
    sif.touch()
    env = environments.load("harbor-local", {"path": str(tasks)}, {"runtime": {"type": runtime}})
    (task,) = env.taskset.load()
    assert task.data.image == (str(sif) if runtime == "apptainer" else f"localhost/primeslurm-tasks:{digest}")
    assert task.data.workdir == (workdir or f"/from-{runtime}")
    assert not task.data.upload_environment, "the image has the files"
    (environment / "data").chmod(0o755)
    with pytest.raises(ValueError, match="is not built"):
        list(env.taskset.load())


@pytest.mark.parametrize(("runtime", "is_file"), [("apptainer", True), ("docker", False)])
def test_local_file_replaces_an_image_of_a_registry(runtime: str, is_file: bool, with_dockerfile: Path) -> None:
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


def test_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    env = environments.load("harbor-local", {"path": str(tmp_path)})
    with pytest.raises(ValueError, match="there is no task"):
        list(env.taskset.load())
    with pytest.raises(UsageError, match="path"):
        environments.load("harbor-local", {})

"""`harbor-local`: terminal and SWE tasks in Harbor's format, read from a directory of one's own.

verifiers' own `harbor` taskset downloads tasks with the Harbor CLI, and needs the harbor package and Python 3.12 to
read them. This one reads `task.toml` itself; setting a task up and grading it is verifiers' (`HarborTask`). A task is

    task.toml         [environment] docker_image, workdir, cpus, memory_mb and storage_mb (or memory and storage, "2G"),
                      env; [agent] and [verifier] timeout_sec; [verifier] env; [metadata] difficulty, category, tags
    instruction.md    what the agent is asked
    environment/      a Dockerfile, whose image `primeslurm images` builds; else files put into the working directory,
                      if no docker_image has them
    tests/test.sh     run in the same place afterwards; writes the reward to /logs/verifier/reward.txt or reward.json
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.runtimes import Runtime
from verifiers.v1.task import TaskResources, TaskTimeout
from verifiers.v1.tasksets.harbor.taskset import HarborData, HarborTask, HarborTaskConfig

from primeslurm.orchestrator.environments.sandbox import containers
from primeslurm.orchestrator.environments.sandbox.runtime import SandboxedRuntime
from primeslurm.wire.stored import task_images
from primeslurm.wire.stored.task_images import TaskImage

__all__ = ["HarborLocalEnv", "HarborLocalTaskset"]

_TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)([KMG])\s*", re.IGNORECASE)
_GIGABYTES = {"K": 1 / 1024**2, "M": 1 / 1024, "G": 1.0}
_BUILT = ("Dockerfile", "docker-compose.yaml")


class HarborLocalConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The arguments of the environment."""

    path: Path
    """Directory that has tasks, at any depth; shared by all nodes."""
    tasks: list[str] | None = None
    """Names of their directories. Default: all."""
    images: Path | None = None
    """Directory of what `primeslurm images` has built of tasks' Dockerfiles. Default: `.images` in `path`."""
    ignore_dockerfile: bool = False
    """Take no image of tasks whose environment is only a Dockerfile: the runtime must have what it has."""
    ignore_timeouts: bool = True
    """Only the recipe's `limits.wall_time_s` counts, not what tasks say of agent and verifier."""
    variables: list[str] = []
    """Variables of the job that `env` of tasks may name as ${NAME}. No others: a task is somebody else's text."""
    task: HarborTaskConfig = HarborTaskConfig()


class HarborLocalData(HarborData):  # type: ignore[misc]
    """A task, as verifiers knows it."""

    grading_env: dict[str, str] = {}
    """Further variables of tests/test.sh, templates not filled in."""


class HarborLocalTask(HarborTask):  # type: ignore[misc]
    """A Harbor task whose templates are filled in from the variables that the recipe names."""

    def runtime_env(self) -> dict[str, str]:
        """The variables of all its programs."""
        return _filled(self.data.env)

    async def setup(self, runtime: Runtime) -> None:
        """Put its files into its working directory."""
        if isinstance(runtime, SandboxedRuntime) and self.data.workdir is not None:
            runtime.cwd = self.data.workdir
        await super().setup(runtime)

    async def run_verifier(self, runtime: Runtime, trace: vf.Trace) -> float | dict[str, float]:
        """Run its tests, and read the reward that they write."""
        graded = runtime.with_env({**runtime.env, **_filled(self.data.grading_env)})
        reward: float | dict[str, float] = await super().run_verifier(graded, trace)
        return reward


class _NotBuiltError(ValueError):
    """A task's Dockerfile has no image."""


class HarborLocalTaskset(vf.Taskset[HarborLocalTask, HarborLocalConfig]):  # type: ignore[misc]
    """The tasks below a directory, by name."""

    runtime = "apptainer"
    """Type of the runtime whose images count."""

    def load(self) -> Iterator[HarborLocalTask]:
        """Yield them. Raises ValueError with all that is wrong with any of them."""
        containers.hide_secrets(self.config.variables)
        path, wanted = self.config.path.resolve(), self.config.tasks
        chosen = task_images.task_directories(path, wanted)
        absent = sorted(set(wanted or ()) - {each.name for each in chosen})
        wrong = [f"{name}: there is no such task in {self.config.path}" for name in absent]
        if not chosen and not absent:
            wrong = [f"there is no task (a directory with task.toml) in {self.config.path}"]
        read, unbuilt = [], []
        for index, directory in enumerate(chosen):
            try:
                read.append(parse(directory, index, self.config, self.runtime))
            except _NotBuiltError:
                unbuilt.append(directory.name)
            except (OSError, ValueError, TypeError, AttributeError) as error:
                wrong.append(f"{directory.name}: {error}")
        if unbuilt:
            wrong.insert(0, self._how_to_build(unbuilt))
        if wrong:
            raise ValueError("; ".join(wrong))
        for data in read:
            yield HarborLocalTask(data, self.config.task)

    def _how_to_build(self, tasks: list[str]) -> str:
        which = f"{task_images.some(tasks)}: environment/Dockerfile"
        if self.runtime not in task_images.RUNTIMES:
            return f"{which} needs a container ({', '.join(task_images.RUNTIMES)}), or `ignore_dockerfile`"
        options = "" if self.runtime == task_images.RUNTIMES[0] else f" --runtime {self.runtime}"
        options += f" --images {self.config.images}" if self.config.images else ""
        return f"{which} is not built for {self.runtime}: `primeslurm images {self.config.path}{options}` does that"


class HarborLocalEnv(SingleAgentEnv):  # type: ignore[misc]
    """One agent that plays a task, in the image that was built for its runtime."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        (agent,) = self._agent_specs.values()
        self.taskset.runtime = agent.runtime.type


def parse(directory: Path, index: int, config: HarborLocalConfig, runtime: str) -> HarborLocalData:
    """Read one task.

    Raises:
        _NotBuiltError: its image is not built for this runtime.
        ValueError: it has what is not done here.
        OSError: a file of it is missing.
    """
    about = task_images.read_task(directory)
    environment, agent = about.get("environment", {}), about.get("agent", {})
    verifier, metadata = about.get("verifier", {}), about.get("metadata", {})
    if problems := _not_done(directory, about, config):
        raise ValueError(", ".join(problems))
    if not (directory / "tests" / "test.sh").is_file():
        raise FileNotFoundError("tests/test.sh is missing")
    image, files = TaskImage(environment.get("docker_image"), None), directory / "environment"
    if name := task_images.pulled_image(about, runtime):  # a file beside the tasks spares nodes the download
        found = task_images.built_image(_images(config), task_images.pulled_digest(name), runtime)
        image = found or image
    if not config.ignore_dockerfile and task_images.must_be_built(directory, about):
        image = _built(files, config, runtime)
    own_files = files.is_dir() and any(path.name not in _BUILT for path in files.iterdir())
    timeouts = {"agent": agent.get("timeout_sec"), "scoring": verifier.get("timeout_sec")}
    return HarborLocalData(
        idx=index,
        name=about.get("task", {}).get("name", directory.name),
        prompt=(directory / "instruction.md").read_text(encoding="utf-8").strip(),
        image=image.image,
        workdir=environment.get("workdir") or image.workdir,
        timeout=TaskTimeout() if config.ignore_timeouts else TaskTimeout(**timeouts),
        resources=_resources(environment),
        difficulty=metadata.get("difficulty"),
        category=metadata.get("category"),
        tags=metadata.get("tags", []),
        task_dir=str(directory),
        upload_environment=image.image is None and own_files,
        env=environment.get("env", {}),
        grading_env=verifier.get("env", {}),
    )


def _images(config: HarborLocalConfig) -> Path:
    return task_images.image_directory(config.path, config.images)


def _built(environment: Path, config: HarborLocalConfig, runtime: str) -> TaskImage:
    found = None
    if runtime in task_images.RUNTIMES:
        found = task_images.built_image(_images(config), task_images.environment_digest(environment), runtime)
    if found is None:
        raise _NotBuiltError
    return found


def _not_done(directory: Path, about: Mapping[str, Any], config: HarborLocalConfig) -> list[str]:
    environment, verifier = about.get("environment", {}), about.get("verifier", {})
    found = []
    if about.get("steps"):
        found.append("tasks of several steps are not done")
    if (directory / "environment" / "docker-compose.yaml").is_file():
        found.append("environment/docker-compose.yaml: tasks of several containers are not done")
    if verifier.get("environment_mode") == "separate" or "environment" in verifier:
        found.append("[verifier] a separate environment is not done")
    if verifier.get("collect"):
        found.append("[[verifier.collect]] is not done: its commands would not be run before the tests")
    if about.get("artifacts"):
        found.append("artifacts are not done: no file of a sandbox is kept")
    unread = ("healthcheck", "mcp_servers", "skills_dir")
    found += [f"[environment] {name} is not done" for name in unread if environment.get(name)]
    found += [f"[{part}] user is not done" for part in ("agent", "verifier") if about.get(part, {}).get("user")]
    texts = [str(text) for part in (environment, verifier) for text in part.get("env", {}).values()]
    named = {match[1] for text in texts for match in _TEMPLATE.finditer(text)}
    found += [f"env names ${{{name}}}, which is not in `variables`" for name in sorted(named - set(config.variables))]
    return found


def _filled(env: Mapping[str, Any]) -> dict[str, str]:
    def value(match: re.Match[str]) -> str:
        default = match[2]
        return os.environ.get(match[1], "" if default is None else default)

    return {name: _TEMPLATE.sub(value, str(text)) for name, text in env.items()}


def _resources(environment: Mapping[str, Any]) -> TaskResources:
    gpus = environment.get("gpus")
    return TaskResources(
        cpu=_number(environment, "cpus"),
        memory=_gigabytes(environment, "memory"),
        disk=_gigabytes(environment, "storage"),
        gpu=str(gpus) if gpus else None,
    )


def _gigabytes(environment: Mapping[str, Any], name: str) -> float | None:
    """A size as older tasks say it (`memory = "2G"`), which counts before one in MiB (`memory_mb`), as in Harbor."""
    said = environment.get(name)
    if said is None:
        megabytes = _number(environment, f"{name}_mb")
        return None if megabytes is None else megabytes / 1024
    match = _SIZE.fullmatch(said) if isinstance(said, str) else None
    if match is None:
        raise ValueError(f'[environment] {name} = {said!r} is not a size: a number and K, M or G, such as "2G"')
    return float(match[1]) * _GIGABYTES[match[2].upper()]


def _number(environment: Mapping[str, Any], name: str) -> float | None:
    value = environment.get(name) or None  # 0 is as good as nothing
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"[environment] {name} = {value!r} is not a number above 0")
    return value

"""`harbor-local`: terminal and SWE tasks in Harbor's format, from a local directory.

verifiers' own `harbor` taskset downloads tasks with the Harbor CLI, and needs the harbor package and Python 3.12 to
read them. This taskset reads `task.toml` itself. verifiers' `HarborTask` sets a task up and grades it. A task has

    task.toml         [environment] docker_image, workdir, cpus, memory_mb and storage_mb (or memory and storage, "2G"),
                      env; [agent] and [verifier] timeout_sec; [verifier] env; [metadata] difficulty, category, tags
    instruction.md    the prompt
    environment/      a Dockerfile, whose image `primeslurm images` builds. Without docker_image and Dockerfile, its
                      files are copied to the working directory.
    tests/test.sh     grades the result in the same container; writes /logs/verifier/reward.txt or reward.json
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
_BUILD_FILES = ("Dockerfile", "docker-compose.yaml")


class HarborLocalConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The arguments of the environment."""

    path: Path
    """Directory with tasks, at any depth. All nodes must see it."""
    tasks: list[str] | None = None
    """Names of task directories. Default: all."""
    images: Path | None = None
    """Directory of the images that `primeslurm images` has built. Default: `.images` in `path`."""
    ignore_dockerfile: bool = False
    """Run tasks without the image of their Dockerfile. The runtime must then have what the Dockerfile installs."""
    ignore_timeouts: bool = True
    """Use only the recipe's `limits.wall_time_s`, not the timeouts of the tasks."""
    variables: list[str] = []
    """Variables of the job that `env` of a task may use as ${NAME}. Others are refused, because tasks are written by
    others."""
    task: HarborTaskConfig = HarborTaskConfig()


class HarborLocalData(HarborData):  # type: ignore[misc]
    """One task."""

    grading_env: dict[str, str] = {}
    """Additional variables of tests/test.sh, before templates are filled in."""


class HarborLocalTask(HarborTask):  # type: ignore[misc]
    """A Harbor task whose variables may refer to variables of the job."""

    def runtime_env(self) -> dict[str, str]:
        return _fill_templates(self.data.env)

    async def setup(self, runtime: Runtime) -> None:
        # Containers start in the task's directory, bubblewrap sandboxes in a fixed one.
        if isinstance(runtime, SandboxedRuntime) and self.data.workdir is not None:
            runtime.cwd = self.data.workdir
        await super().setup(runtime)

    async def run_verifier(self, runtime: Runtime, trace: vf.Trace) -> float | dict[str, float]:
        with_env = runtime.with_env({**runtime.env, **_fill_templates(self.data.grading_env)})
        reward: float | dict[str, float] = await super().run_verifier(with_env, trace)
        return reward


class _NotBuiltError(ValueError):
    """A task's Dockerfile has no built image."""


class HarborLocalTaskset(vf.Taskset[HarborLocalTask, HarborLocalConfig]):  # type: ignore[misc]
    """The tasks below a directory, sorted by name."""

    runtime = "apptainer"
    """Type of the runtime that needs images."""

    def load(self) -> Iterator[HarborLocalTask]:
        """Yield the tasks. Raises one ValueError with the problems of all tasks."""
        # A task may put these variables into others. Their values must not appear in command lines.
        containers.hide_secrets(self.config.variables)
        path, names = self.config.path.resolve(), self.config.tasks
        directories = task_images.task_directories(path, names)
        absent = sorted(set(names or ()) - {each.name for each in directories})
        problems = [f"{name}: there is no such task in {self.config.path}" for name in absent]
        if not directories and not absent:
            problems = [f"there is no task (a directory with task.toml) in {self.config.path}"]
        tasks, unbuilt = [], []
        for index, directory in enumerate(directories):
            try:
                tasks.append(read_task(directory, index, self.config, self.runtime))
            except _NotBuiltError:
                unbuilt.append(directory.name)
            except (OSError, ValueError, TypeError, AttributeError) as error:
                problems.append(f"{directory.name}: {error}")
        if unbuilt:
            problems.insert(0, self._how_to_build(unbuilt))
        if problems:
            raise ValueError("; ".join(problems))
        for data in tasks:
            yield HarborLocalTask(data, self.config.task)

    def _how_to_build(self, tasks: list[str]) -> str:
        which = f"{task_images.first_names(tasks)}: environment/Dockerfile"
        if self.runtime not in task_images.RUNTIMES:
            return f"{which} needs a container ({', '.join(task_images.RUNTIMES)}), or `ignore_dockerfile`"
        options = "" if self.runtime == task_images.RUNTIMES[0] else f" --runtime {self.runtime}"
        options += f" --images {self.config.images}" if self.config.images else ""
        return f"{which} is not built for {self.runtime}: `primeslurm images {self.config.path}{options}` does that"


class HarborLocalEnv(SingleAgentEnv):  # type: ignore[misc]
    """One agent that works on a task, in the image that was built for its runtime."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # Only here the runtime is known, which decides which images the tasks need.
        (agent,) = self._agent_specs.values()
        self.taskset.runtime = agent.runtime.type


def read_task(directory: Path, index: int, config: HarborLocalConfig, runtime: str) -> HarborLocalData:
    """Read one task.

    Raise _NotBuiltError if its image is not built for this runtime, ValueError if it is invalid, or uses an unsupported
    feature, and OSError if one of its files is missing.
    """
    settings = task_images.read_task(directory)
    environment, agent = settings.get("environment", {}), settings.get("agent", {})
    verifier, metadata = settings.get("verifier", {}), settings.get("metadata", {})
    if problems := _unsupported(directory, settings, config):
        raise ValueError(", ".join(problems))
    if not (directory / "tests" / "test.sh").is_file():
        raise FileNotFoundError("tests/test.sh is missing")
    image, files = TaskImage(environment.get("docker_image"), None), directory / "environment"
    images = task_images.image_directory(config.path, config.images)
    if name := task_images.pulled_image(settings, runtime):
        # An image file in the images directory spares each node the download.
        image = task_images.built_image(images, task_images.pulled_digest(name), runtime) or image
    if not config.ignore_dockerfile and task_images.must_be_built(directory, settings):
        built = None
        if runtime in task_images.RUNTIMES:
            built = task_images.built_image(images, task_images.environment_digest(files), runtime)
        if built is None:
            raise _NotBuiltError
        image = built
    has_files = files.is_dir() and any(path.name not in _BUILD_FILES for path in files.iterdir())
    timeouts = {"agent": agent.get("timeout_sec"), "scoring": verifier.get("timeout_sec")}
    gpus = environment.get("gpus")
    return HarborLocalData(
        idx=index,
        name=settings.get("task", {}).get("name", directory.name),
        prompt=(directory / "instruction.md").read_text(encoding="utf-8").strip(),
        image=image.image,
        workdir=environment.get("workdir") or image.workdir,
        timeout=TaskTimeout() if config.ignore_timeouts else TaskTimeout(**timeouts),
        resources=TaskResources(
            cpu=_number(environment, "cpus"),
            memory=_gigabytes(environment, "memory"),
            disk=_gigabytes(environment, "storage"),
            gpu=str(gpus) if gpus else None,
        ),
        difficulty=metadata.get("difficulty"),
        category=metadata.get("category"),
        tags=metadata.get("tags", []),
        task_dir=str(directory),
        upload_environment=image.image is None and has_files,
        env=environment.get("env", {}),
        grading_env=verifier.get("env", {}),
    )


def _unsupported(directory: Path, settings: Mapping[str, Any], config: HarborLocalConfig) -> list[str]:
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    problems = []
    if settings.get("steps"):
        problems.append("tasks of several steps are not supported")
    if (directory / "environment" / "docker-compose.yaml").is_file():
        problems.append("environment/docker-compose.yaml: tasks of several containers are not supported")
    if verifier.get("environment_mode") == "separate" or "environment" in verifier:
        problems.append("[verifier] a separate environment is not supported")
    if verifier.get("collect"):
        problems.append("[[verifier.collect]] is not supported: its commands would not run before the tests")
    if settings.get("artifacts"):
        problems.append("artifacts are not supported: no file of a sandbox is kept")
    for name in ("healthcheck", "mcp_servers", "skills_dir"):
        if environment.get(name):
            problems.append(f"[environment] {name} is not supported")
    for part in ("agent", "verifier"):
        if settings.get(part, {}).get("user"):
            problems.append(f"[{part}] user is not supported")
    texts = [str(text) for part in (environment, verifier) for text in part.get("env", {}).values()]
    variables = {match[1] for text in texts for match in _TEMPLATE.finditer(text)}
    refused = sorted(variables - set(config.variables))
    return problems + [f"env uses ${{{name}}}, which is not in `variables`" for name in refused]


def _fill_templates(env: Mapping[str, Any]) -> dict[str, str]:
    def value(match: re.Match[str]) -> str:
        return os.environ.get(match[1], match[2] or "")

    return {name: _TEMPLATE.sub(value, str(text)) for name, text in env.items()}


def _gigabytes(environment: Mapping[str, Any], name: str) -> float | None:
    # As in Harbor, the older form (memory = "2G") takes precedence over the one in MiB (memory_mb).
    size = environment.get(name)
    if size is None:
        megabytes = _number(environment, f"{name}_mb")
        return None if megabytes is None else megabytes / 1024
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ValueError(f'[environment] {name} = {size!r} is not a size: a number and K, M or G, such as "2G"')
    return float(match[1]) * _GIGABYTES[match[2].upper()]


def _number(environment: Mapping[str, Any], name: str) -> float | None:
    value = environment.get(name) or None  # 0 means: not set
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"[environment] {name} = {value!r} is not a number above 0")
    return value

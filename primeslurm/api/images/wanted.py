"""The container images that Harbor tasks need, built from a Dockerfile or pulled from a registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.paths import expanded, is_dir, is_file
from primeslurm.recipe.reading.recipe_files import find_recipe, load_recipe
from primeslurm.wire.stored import task_images

TASKSET = "harbor-local"


@dataclass(frozen=True)
class TaskSource:
    """Tasks whose images are needed."""

    tasks: Path  # directory that contains the tasks, at any depth
    names: tuple[str, ...] | None  # names of task directories; None for all
    images: Path
    runtime: str


@dataclass(frozen=True)
class WantedImage:
    """An image that tasks need."""

    digest: str
    runtime: str
    images: Path
    environment: Path  # directory of the Dockerfile
    tasks: tuple[str, ...]
    pulled: str | None = None  # Name of the image in a registry. None: the image is built from a Dockerfile.

    @property
    def name(self) -> str:
        """Path of its SIF file, or its tag."""
        return task_images.image_name(self.images, self.digest, self.runtime)

    @property
    def tag(self) -> str:
        """Name of the image in docker, podman or buildah."""
        return f"{task_images.REPOSITORY}:{self.digest}"

    @property
    def log(self) -> Path:
        return self.images / f"{self.digest}.log"


def sources(path: Path, runtime: str | None, images: Path | None) -> list[TaskSource]:
    """Return the tasks of a directory, or of the environments of a recipe.

    `runtime` (apptainer by default) and `images` (the directory of images) are options for a directory; a recipe has
    its own. Raises UsageError if the path is neither, or an option contradicts the recipe.
    """
    path = expanded(path)
    if not is_file(path):
        return _of_directory(path, runtime or "apptainer", images)
    options = {"--runtime": runtime, "--images": images}
    why = "a recipe sets this in `runtime` and `args.images` of its environments"
    if problems := [Violation(name, str(value), why) for name, value in options.items() if value is not None]:
        raise UsageError(problems)
    return _of_recipe(path)


def _of_directory(tasks: Path, runtime: str, images: Path | None) -> list[TaskSource]:
    problems = []
    if not is_dir(tasks):
        problems.append(Violation("TASKS", str(tasks), "is neither a directory of tasks nor a recipe"))
    if runtime not in task_images.RUNTIMES:
        why = "is not a container runtime that images can be built for"
        problems.append(Violation("--runtime", runtime, why, f"one of {', '.join(task_images.RUNTIMES)}"))
    if problems:
        raise UsageError(problems)
    return [TaskSource(tasks, None, task_images.image_directory(tasks, images), runtime)]


def _of_recipe(path: Path) -> list[TaskSource]:
    sources = []
    for environment in load_recipe(find_recipe(path)).all_environments:
        tasks, names = environment.args.get("path"), environment.args.get("tasks")
        runtime = environment.runtime.type if environment.runtime else "apptainer"
        if environment.id == TASKSET and isinstance(tasks, str) and runtime in task_images.RUNTIMES:
            images = environment.args.get("images")
            images = task_images.image_directory(Path(tasks), Path(images) if isinstance(images, str) else None)
            task_names = tuple(map(str, names)) if isinstance(names, list | tuple) else None
            sources.append(TaskSource(Path(tasks), task_names, images, runtime))
    missing = [source.tasks for source in sources if not is_dir(source.tasks)]
    problems = [Violation("environments.args.path", str(each), "is not a directory") for each in missing]
    if not sources:
        why = f"has no environment {TASKSET} that runs in {' or '.join(task_images.RUNTIMES)}"
        problems = [Violation("TASKS", str(path), why)]
    if problems:
        raise UsageError(problems)
    return sources


def wanted_images(sources: Sequence[TaskSource]) -> list[WantedImage]:
    """Return the images that tasks need, without duplicates. Raises UsageError if a task cannot be read."""
    problems, wanted = [], dict[tuple[str, str, Path], WantedImage]()
    for source in sources:
        directories = task_images.task_directories(source.tasks, source.names)
        if not directories:
            problems.append(Violation("TASKS", str(source.tasks), "has no task (a directory with task.toml)"))
        for directory in directories:
            try:
                task = task_images.read_task(directory)
                pulled = task_images.pulled_image(task, source.runtime)
                if pulled or task_images.must_be_built(directory, task):
                    _add(wanted, source, directory, pulled)
            except (OSError, ValueError, AttributeError) as error:
                problems.append(Violation(str(directory / "task.toml"), "", f"cannot be read: {error}"))
    if problems:
        raise UsageError(problems)
    return list(wanted.values())


def _add(
    wanted: dict[tuple[str, str, Path], WantedImage], source: TaskSource, directory: Path, pulled: str | None
) -> None:
    environment = directory / "environment"
    digest = task_images.pulled_digest(pulled) if pulled else task_images.environment_digest(environment)
    key = (digest, source.runtime, source.images)
    new = WantedImage(digest, source.runtime, source.images, environment.resolve(), (), pulled)
    image = wanted.get(key, new)
    wanted[key] = replace(image, tasks=tuple(dict.fromkeys((*image.tasks, directory.name))))

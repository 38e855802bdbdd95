"""Which container images Harbor tasks of a directory or a recipe need, as a Dockerfile or as the name of an image."""

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
    """Tasks whose images are wanted, and for what."""

    tasks: Path
    """Directory that has them, at any depth."""
    names: tuple[str, ...] | None
    """Of their directories; None: all."""
    images: Path
    runtime: str


@dataclass(frozen=True)
class WantedImage:
    """An image, and the tasks that run in it."""

    digest: str
    runtime: str
    images: Path
    environment: Path
    """Directory with the Dockerfile, of one of the tasks."""
    tasks: tuple[str, ...]
    pulled: str | None = None
    """Name of the image in its registry, if it is fetched and not built."""

    @property
    def name(self) -> str:
        """Path of its SIF, or its tag."""
        return task_images.image_name(self.images, self.digest, self.runtime)

    @property
    def tag(self) -> str:
        """What docker, podman or buildah calls it."""
        return f"{task_images.REPOSITORY}:{self.digest}"

    @property
    def log(self) -> Path:
        """What the commands of a build that failed said, if its error shows only the end of it."""
        return self.images / f"{self.digest}.log"


def sources(path: Path, runtime: str | None, images: Path | None) -> list[TaskSource]:
    """Name the tasks that a path stands for: a recipe, or a directory of tasks.

    Args:
        path: of either.
        runtime: what the images are for, by default apptainer; a recipe says that itself.
        images: where they go; a recipe says that itself.

    Raises:
        UsageError: it is neither, or an option contradicts the recipe.
    """
    path = expanded(path)
    if not is_file(path):
        return _of_directory(path, runtime or "apptainer", images)
    said = {"--runtime": runtime, "--images": images}
    why = "a recipe says that itself, in `runtime` and `args.images` of its environments"
    if problems := [Violation(name, str(value), why) for name, value in said.items() if value is not None]:
        raise UsageError(problems)
    return _of_recipe(path)


def _of_directory(tasks: Path, runtime: str, images: Path | None) -> list[TaskSource]:
    problems = []
    if not is_dir(tasks):
        problems.append(Violation("TASKS", str(tasks), "is neither a directory of tasks nor a recipe"))
    if runtime not in task_images.RUNTIMES:
        why = "runs no image that is built here"
        problems.append(Violation("--runtime", runtime, why, f"one of {', '.join(task_images.RUNTIMES)}"))
    if problems:
        raise UsageError(problems)
    return [TaskSource(tasks, None, task_images.image_directory(tasks, images), runtime)]


def _of_recipe(path: Path) -> list[TaskSource]:
    """Those of environments that run in a container of the node."""
    found = []
    for environment in load_recipe(find_recipe(path)).all_environments:
        tasks, names = environment.args.get("path"), environment.args.get("tasks")
        kind = environment.runtime.type if environment.runtime else "apptainer"
        if environment.id == TASKSET and isinstance(tasks, str) and kind in task_images.RUNTIMES:
            said = environment.args.get("images")
            images = task_images.image_directory(Path(tasks), Path(said) if isinstance(said, str) else None)
            wanted = tuple(map(str, names)) if isinstance(names, list | tuple) else None
            found.append(TaskSource(Path(tasks), wanted, images, kind))
    absent = [source.tasks for source in found if not is_dir(source.tasks)]
    problems = [Violation("environments.args.path", str(each), "is no directory") for each in absent]
    if not found:
        why = f"has no environment {TASKSET} that runs in {' or '.join(task_images.RUNTIMES)}"
        problems = [Violation("TASKS", str(path), why)]
    if problems:
        raise UsageError(problems)
    return found


def wanted_images(sources: Sequence[TaskSource]) -> list[WantedImage]:
    """List the images that tasks need, each once, in the order of their first tasks.

    Raises:
        UsageError: there is no task, or one cannot be read.
    """
    problems, found = [], dict[tuple[str, str, Path], WantedImage]()
    for source in sources:
        directories = task_images.task_directories(source.tasks, source.names)
        if not directories:
            problems.append(Violation("TASKS", str(source.tasks), "has no task (a directory with task.toml)"))
        for directory in directories:
            try:
                about = task_images.read_task(directory)
                pulled = task_images.pulled_image(about, source.runtime)
                if pulled or task_images.must_be_built(directory, about):
                    _add(found, source, directory, pulled)
            except (OSError, ValueError, AttributeError) as error:
                problems.append(Violation(str(directory / "task.toml"), "", f"cannot be read: {error}"))
    if problems:
        raise UsageError(problems)
    return list(found.values())


def _add(
    found: dict[tuple[str, str, Path], WantedImage], source: TaskSource, directory: Path, pulled: str | None
) -> None:
    environment = directory / "environment"
    digest = task_images.pulled_digest(pulled) if pulled else task_images.environment_digest(environment)
    key = (digest, source.runtime, source.images)
    first = found.setdefault(key, WantedImage(digest, source.runtime, source.images, environment.resolve(), (), pulled))
    found[key] = replace(first, tasks=tuple(dict.fromkeys((*first.tasks, directory.name))))

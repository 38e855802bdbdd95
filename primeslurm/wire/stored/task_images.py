"""Container images of Harbor tasks: `primeslurm images` builds them, environment workers look them up.

All images are in one directory, by default `.images` beside the tasks. An image is named by the digest of its build
context, so tasks with equal environments share one image, and an edited Dockerfile needs a new one:

    DIGEST.sif          the image for apptainer; docker and podman keep theirs under the tag DIGEST
    DIGEST.RUNTIME      written last, marks the image as complete: the image's working directory, on one line
    DIGEST.log          output of a failed build, if its error shows only a part of it
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primeslurm.base import files
from primeslurm.base.files import digest, write_atomic

RUNTIMES = ("apptainer", "docker", "podman")  # runtimes whose images can be built
REPOSITORY = "localhost/primeslurm-tasks"
_DIRECTORY = ".images"
_MAX_LISTED = 3  # names that `first_names` lists


@dataclass(frozen=True)
class TaskImage:
    """The container image in which a Harbor task's programs run, and their working directory."""

    image: str | None  # Path of a SIF file, or a tag. None: the runtime's default image.
    workdir: str | None  # Directory where programs start. None: the image does not set one.


def image_directory(tasks: Path, configured: Path | None = None) -> Path:
    """Return the configured image directory, or the default one of a directory of tasks."""
    return (configured or tasks / _DIRECTORY).absolute()


def task_directories(tasks: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Return all task directories at any depth below `tasks`, or only those with these names."""
    directories = sorted(path.parent for path in files.retrying(tasks, lambda: list(tasks.rglob("task.toml"))))
    return [path for path in directories if names is None or path.name in names]


def read_task(directory: Path) -> dict[str, Any]:
    return tomllib.loads(files.read_text(directory / "task.toml"))


def must_be_built(directory: Path, about: Mapping[str, Any]) -> bool:
    """Return whether a task has a Dockerfile and names no ready image."""
    has_image = bool(about.get("environment", {}).get("docker_image"))
    return not has_image and files.is_file(directory / "environment" / "Dockerfile")


def environment_digest(environment: Path) -> str:
    """Return the digest of a build context: paths, contents and permissions below a directory, no times or owners."""
    return files.retrying(environment, lambda: _digest_below(environment))


def pulled_image(about: Mapping[str, Any], runtime: str) -> str | None:
    """Return the registry's name of an image that `primeslurm images` downloads for apptainer; None for other tasks."""
    image = about.get("environment", {}).get("docker_image")
    is_file = isinstance(image, str) and (image.startswith(("/", ".")) or image.endswith(".sif"))
    return image if image and runtime == "apptainer" and not is_file else None


def pulled_digest(image: str) -> str:
    return hashlib.blake2b(f"docker://{image}".encode(), digest_size=16).hexdigest()


def _digest_below(environment: Path) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for path in _files(environment):
        status = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else digest(path) if path.is_file() else ""
        words = (str(path.relative_to(environment)), f"{status.st_mode:o}", content)
        hasher.update("".join(f"{len(word)}:{word}" for word in words).encode(errors="surrogateescape"))
    return hasher.hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:  # os.walk would skip what it cannot list
        raise error

    for parent, directories, names in os.walk(directory, onerror=refuse):
        directories.sort()
        yield from (Path(parent, name) for name in sorted((*directories, *names)))


def image_name(images: Path, name: str, runtime: str) -> str:
    return str(images / f"{name}.sif") if runtime == "apptainer" else f"{REPOSITORY}:{name}"


def built_image(images: Path, name: str, runtime: str) -> TaskImage | None:
    image = image_name(images, name, runtime)
    try:
        workdir = files.read_text(images / f"{name}.{runtime}").strip()
    except FileNotFoundError:
        return None
    if runtime == "apptainer" and not files.is_file(Path(image)):
        return None
    return TaskImage(image, workdir or None)


def note_built(images: Path, name: str, runtime: str, workdir: str) -> None:
    files.unlink(images / f"{name}.{runtime}")
    write_atomic(images / f"{name}.{runtime}", f"{workdir}\n")


def first_names(names: Sequence[str]) -> str:
    """Return up to three names in one line, and the number of the others."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")

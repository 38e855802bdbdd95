"""Container images of Harbor tasks: `primeslurm images` makes them, workers look for them.

They lie in one directory, by default `.images` beside the tasks. An image is named after what it is built of, so tasks
with the same environment share one, and whoever edits a Dockerfile asks for another one:

    DIGEST.sif          what apptainer runs; docker and podman keep theirs, tagged DIGEST
    DIGEST.RUNTIME      written last, as without it nothing is built: the image's working directory, on one line
    DIGEST.log          what the commands of a build that failed said, if that is more than its error shows
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

RUNTIMES = ("apptainer", "docker", "podman")
"""Runtimes whose images can be built."""
REPOSITORY = "localhost/primeslurm-tasks"
_DIRECTORY = ".images"
_NAMED = 3
"""Tasks whose names are said in one line."""


@dataclass(frozen=True)
class TaskImage:
    """What the programs of a task run in."""

    image: str | None
    """Path of a SIF, or a tag; None: the runtime's own."""
    workdir: str | None
    """Where its programs start; None: the image does not say."""


def image_directory(tasks: Path, said: Path | None = None) -> Path:
    """Say where images of the tasks below a directory are."""
    return (said or tasks / _DIRECTORY).absolute()


def task_directories(tasks: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Find tasks at any depth below a directory: all, or those whose directories have these names."""
    found = sorted(path.parent for path in files.retrying(tasks, lambda: list(tasks.rglob("task.toml"))))
    return [path for path in found if names is None or path.name in names]


def read_task(directory: Path) -> dict[str, Any]:
    """Read what a task says of itself.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no TOML.
    """
    return tomllib.loads(files.read_text(directory / "task.toml"))


def must_be_built(directory: Path, about: Mapping[str, Any]) -> bool:
    """Tell whether a task's container is described by a Dockerfile alone."""
    return files.is_file(directory / "environment" / "Dockerfile") and not about.get("environment", {}).get(
        "docker_image"
    )


def environment_digest(environment: Path) -> str:
    """Name what an image is built of: paths, contents and permissions of a directory. Times and owners do not count.

    Args:
        environment: the directory of the Dockerfile, which is the build's context.
    """
    return files.retrying(environment, lambda: _digest_below(environment))


def pulled_image(about: Mapping[str, Any], runtime: str) -> str | None:
    """Return the registry's name of an image that `primeslurm images` fetches for a task; None if it fetches none.

    Engines such as docker keep their own images, so only apptainer gets a file.
    """
    image = about.get("environment", {}).get("docker_image")
    is_file = isinstance(image, str) and (image.startswith(("/", ".")) or image.endswith(".sif"))
    return image if image and runtime == "apptainer" and not is_file else None


def pulled_digest(image: str) -> str:
    """Name the file of an image that comes from a registry."""
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
    def refuse(error: OSError) -> None:
        raise error

    for place, directories, names in os.walk(directory, onerror=refuse):
        directories.sort()
        yield from (Path(place, name) for name in sorted((*directories, *names)))


def image_name(images: Path, name: str, runtime: str) -> str:
    """Say the path of a SIF, or the tag that an engine keeps an image by."""
    return str(images / f"{name}.sif") if runtime == "apptainer" else f"{REPOSITORY}:{name}"


def built_image(images: Path, name: str, runtime: str) -> TaskImage | None:
    """Find an image that was built for a runtime; None if there is none.

    Args:
        images: their directory.
        name: digest of what it is built of.
        runtime: one of `RUNTIMES`.
    """
    image = image_name(images, name, runtime)
    try:
        workdir = files.read_text(images / f"{name}.{runtime}").strip()
    except FileNotFoundError:
        return None
    if runtime == "apptainer" and not files.is_file(Path(image)):
        return None
    return TaskImage(image, workdir or None)


def note_built(images: Path, name: str, runtime: str, workdir: str) -> None:
    """Say that an image is there: `built_image` finds it from now on. Raises OSError."""
    files.unlink(images / f"{name}.{runtime}")
    write_atomic(images / f"{name}.{runtime}", f"{workdir}\n")


def some(names: Sequence[str]) -> str:
    """List names in one line, however many there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")

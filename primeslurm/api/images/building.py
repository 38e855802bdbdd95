"""Build container images of tasks with the programs of this machine.

A SIF image takes two steps: podman, buildah or docker builds the Dockerfile, and apptainer converts the exported
archive. A finished image is renamed into place and recorded last, so an interrupted build can simply be repeated.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from primeslurm.api.images.wanted import WantedImage
from primeslurm.base.errors import PrimeslurmError, UsageError, Violation
from primeslurm.wire.stored import task_images

# Programs that build a Dockerfile for a runtime that cannot. The first one that works is used.
_BUILDERS = {"apptainer": ("podman", "buildah", "docker")}


# Lines of a failed build's log in its error, and characters per line.
_LINES, _LINE = 10, 300


def is_there(image: WantedImage) -> bool:
    """True if an image was built, and the container engine of this machine still has it."""
    if task_images.built_image(image.images, image.digest, image.runtime) is None:
        return False
    return image.runtime == "apptainer" or _succeeds([image.runtime, "image", "inspect", image.tag])


class ImageBuilder:
    """Builds images. With `dry_run`, missing programs are listed in `problems` instead of raising UsageError."""

    def __init__(self, images: Collection[WantedImage], dry_run: bool = False) -> None:
        self.problems: list[Violation] = []  # programs that a dry run did not find
        # An image from a registry needs apptainer alone.
        self._tools = {runtime: self._working(runtime) for runtime in {i.runtime for i in images if not i.pulled}}
        if shutil.which("apptainer") is None and any(image.runtime == "apptainer" for image in images):
            why = "apptainer, which writes the images, is not installed here"
            self.problems.append(Violation("--runtime", "apptainer", why, "install apptainer, or use another machine"))
        if self.problems and not dry_run:
            raise UsageError(self.problems)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def _working(self, runtime: str) -> str:
        tools = _BUILDERS.get(runtime, (runtime,))
        for tool in tools:
            if _succeeds([tool, "info"]):
                return tool
        broken = [f"`{tool} info` fails" for tool in tools if shutil.which(tool)]
        why = " and ".join(broken) or f"none of {', '.join(tools)} is installed here"
        fix = "build on another machine that sees the same directory"
        self.problems.append(Violation("--runtime", "", f"no program can build a Dockerfile: {why}", fix))
        return tools[0]

    def commands(self, image: WantedImage, archive: Path, sif: Path) -> list[list[str]]:
        """Return the commands that build an image; for a SIF file, the builder exports `archive` for apptainer."""
        if image.pulled:
            return [["apptainer", "build", "--disable-cache", str(sif), f"docker://{image.pulled}"]]
        tool = self._tools[image.runtime]
        commands = [[tool, "build", "--tag", image.tag, str(image.environment)]]
        if image.runtime == "apptainer":
            export, kind = _export(tool, image.tag, archive)
            # it is read once: no copy of it stays in apptainer's cache
            commands += [export, ["apptainer", "build", "--disable-cache", str(sif), f"{kind}:{archive}"]]
        return commands

    def build(self, images: Sequence[WantedImage], jobs: int, progress: Callable[[str], None]) -> None:
        """Build images, `jobs` at a time, and call `progress` with a line of text after each.

        Raises PrimeslurmError that names all failed images. The others are built.
        """
        failed = []
        with ThreadPoolExecutor(jobs) as pool:
            builds = {pool.submit(self._build, image): image for image in images}
            try:
                for number, done in enumerate(as_completed(builds), 1):
                    image, error = builds[done], done.exception()
                    how = "failed" if error else "built"
                    progress(f"{number} of {len(images)}: {how} {task_images.first_names(image.tasks)}")
                    if error:
                        failed.append(f"{', '.join(image.tasks)}: {error}")
            except BaseException:
                # After Ctrl-C, no build may continue in the background.
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise
        if failed:
            raise PrimeslurmError("\n".join([f"{len(failed)} of {len(images)} images were not built", *failed]))

    def _build(self, image: WantedImage) -> None:
        tool, is_sif = self._tools.get(image.runtime, ""), image.runtime == "apptainer"
        image.images.mkdir(parents=True, exist_ok=True)
        _sweep(image)
        image.log.unlink(missing_ok=True)  # an earlier build's
        # Several hosts may build into one directory, so the temporary name has host and process.
        part = image.images / f"{image.digest}.{socket.gethostname()}.{os.getpid()}.part"
        with tempfile.TemporaryDirectory(prefix="primeslurm-images-") as directory:
            try:
                for command in self.commands(image, Path(directory, "image.tar"), part):
                    self._run(command, Path(directory, "log"), image.log)
                workdir = "" if image.pulled else _workdir(tool, image.tag)
                if is_sif:
                    part.replace(image.name)
            finally:
                part.unlink(missing_ok=True)
        task_images.note_built(image.images, image.digest, image.runtime, workdir)
        if is_sif and not image.pulled:  # it is what counts, and a builder's storage is small
            _succeeds([tool, "rmi", image.tag])

    def _run(self, command: Sequence[str], log: Path, kept_log: Path) -> None:
        """Run a command and append its output to `log`, which is moved to `kept_log` if the error shows only a part."""
        with log.open("ab") as output:
            with self._lock:
                if self._stopped:
                    raise PrimeslurmError("was interrupted")
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
            stopped = self._stopped
        if code:
            last_lines = [] if stopped else _ending(log, kept_log)
            raise PrimeslurmError("\n  ".join([f"{command[0]} {command[1]} ended with exit code {code}", *last_lines]))

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()


def _ending(log: Path, kept_log: Path) -> list[str]:
    """Return the last lines of a log. A longer log is moved to `kept_log`."""
    lines = log.read_text(errors="replace").strip().splitlines()
    shown = [line[:_LINE] for line in lines[-_LINES:]]
    if shown == lines:
        return shown
    shutil.move(log, kept_log)
    return [*shown, f"(the end of {kept_log})"]


def _workdir(tool: str, tag: str) -> str:
    """Return the working directory of an image; empty if it has none. Raises PrimeslurmError."""
    command = [tool, "image", "inspect", "--format", "{{.Config.WorkingDir}}", tag]
    if tool == "buildah":
        command = [tool, "inspect", "--type", "image", "--format", "{{.OCIv1.Config.WorkingDir}}", tag]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        raise PrimeslurmError(f"{tool} cannot read the working directory of the image: {done.stderr.strip()[-300:]}")
    return "" if done.stdout.strip() == "/" else done.stdout.strip()


def _export(tool: str, tag: str, archive: Path) -> tuple[list[str], str]:
    """Return the command that exports an image to a file, and apptainer's name for the format of the file."""
    if tool == "docker":
        return ["docker", "save", "--output", str(archive), tag], "docker-archive"
    if tool == "podman":
        return ["podman", "save", "--format", "oci-archive", "--output", str(archive), tag], "oci-archive"
    return ["buildah", "push", tag, f"oci-archive:{archive}"], "oci-archive"


def _succeeds(command: Sequence[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
    return False


def _sweep(image: WantedImage) -> None:
    """Remove files that interrupted builds of this machine have left."""
    for path in image.images.glob(f"{image.digest}.{socket.gethostname()}.*.part"):
        if not Path("/proc", path.suffixes[-2][1:]).exists():
            path.unlink(missing_ok=True)

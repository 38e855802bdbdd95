"""A disk of fixed size for an apptainer instance: an ext3 file system in a sparse file, which lies over the image.

verifiers gives an instance directories of the node, which nothing bounds. Here all that programs write, also to their
working directory, `/tmp` and their home, goes to the overlay. apptainer mounts it without rights by fuse2fs; mke2fs
fills it while it is made, as only what its user owns can be changed there: files of the image are root's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.apptainer import ApptainerConfig, ApptainerRuntime
from verifiers.v1.runtimes.base import parse_gpu
from verifiers.v1.runtimes.container import cli

from primeslurm.orchestrator.environments.sandbox.limits import GB
from primeslurm.recipe.sections.sandboxes import Limits

PROGRAMS = ("fuse2fs", "fuse-overlayfs", "mke2fs")
"""What it takes beside apptainer, whose packages may bring the first two."""
_SYSTEM = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where users' programs may lie that not every user's PATH has."""
_CONTAINED = ("--cleanenv", "--containall", "--no-mount", "cwd,hostfs,bind-paths,home,tmp", "--no-eval")
_INODE_BYTES = 4096
_COPY = 'if [ -d "$1" ]; then cp -R -P "$1"/. "$2"/; fi'


class FixedSizeDisk(ApptainerRuntime):  # type: ignore[misc]
    """An instance whose recipe says `disk_gb`."""

    config: ApptainerConfig
    limits: ClassVar[Limits]
    _instance: str
    _dir: Path | None

    async def start(self) -> None:
        """Start the instance, with a disk of its own if the recipe bounds it. Raises SandboxError."""
        if self.limits.disk_gb is None:
            await super().start()
            return
        self._dir = Path(tempfile.mkdtemp(prefix="vf-apptainer-"))
        image = await self._image()
        script = await _answer("inspect", "--startscript", image)
        if any(line.strip() and not line.lstrip().startswith("#") for line in script.splitlines()):
            raise SandboxError("Apptainer requires an image without a startscript")  # as verifiers
        disk = self._dir / "disk.img"
        await self._make(disk, image, round(self.limits.disk_gb * GB))
        limits = [] if self.config.cpu is None else ["--cpus", str(self.config.cpu)]
        limits += [] if self.config.memory is None else ["--memory", f"{self.config.memory}g"]
        limits += ["--nv"] if parse_gpu(self.config.gpu)[1] else []
        await _answer("instance", "start", *_CONTAINED, "--overlay", str(disk), *limits, image, self._instance)
        self.info.id = self._instance

    async def _make(self, disk: Path, image: str, size: int) -> None:
        """Make a disk that has what the image has in its working directory, all of it the user's."""
        assert self._dir is not None and self.config.workdir is not None
        files = self._dir / "files"
        own = files / "upper" / self.config.workdir.lstrip("/")
        for path in (files / "work", own, files / "upper" / str(Path.home()).lstrip("/")):
            path.mkdir(parents=True, exist_ok=True)
        for name in ("tmp", "var/tmp"):
            path = files / "upper" / name
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o1777)
        inside = f"/{self._instance}"
        shown = ("--bind", f"{own}:{inside}")
        await _answer("exec", *_CONTAINED, *shown, image, "sh", "-c", _COPY, "copy", self.config.workdir, inside)
        with disk.open("wb") as file:
            file.truncate(size)
        words = ["-q", "-F", "-t", "ext3", "-m", "0", "-b", "4096", "-i", str(_INODE_BYTES), "-J", "size=4"]
        owner = f"root_owner={os.getuid()}:{os.getgid()}"
        program = find("mke2fs") or "mke2fs"
        done = await cli(program, *words, "-E", owner, "-d", str(files), str(disk))
        if done.exit_code:
            why = f"runtime.limits.disk_gb: no disk of this size has what the image has in {self.config.workdir}"
            raise SandboxError(f"{why}: {done.stderr.strip()[-300:]}")
        await asyncio.to_thread(shutil.rmtree, files)


async def _answer(*words: str) -> str:
    """What an apptainer command prints. Raises SandboxError."""
    done = await cli("apptainer", *words)
    if done.exit_code:
        raise SandboxError(f"apptainer {words[0]} failed: {done.stderr.strip()[-2000:]}")
    return str(done.stdout)


def find(program: str) -> str | None:
    """Find one of `PROGRAMS`, where apptainer would."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), _SYSTEM, *_bundled()]))


def lacking() -> list[str]:
    """Say what this machine has not of what such disks take."""
    found = [program for program in PROGRAMS if find(program) is None]
    return found if os.access("/dev/fuse", os.R_OK | os.W_OK) else [*found, "/dev/fuse"]


@functools.cache
def _bundled() -> tuple[str, ...]:
    """Where apptainer keeps programs of its own."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["apptainer", "buildcfg", "LIBEXECDIR"]
        said = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=True
        ).stdout.strip()
        return (f"{said}/apptainer/bin",) if said else ()
    return ()

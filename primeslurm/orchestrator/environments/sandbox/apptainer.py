"""Isolation that verifiers' apptainer runtime lacks: a private network, a disk of fixed size, and a probe of limits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult, RuntimeProcess
from verifiers.v1.runtimes.apptainer import ApptainerConfig, ApptainerRuntime
from verifiers.v1.runtimes.base import parse_gpu
from verifiers.v1.runtimes.container import cli

from primeslurm.orchestrator.environments.sandbox.limits import GB
from primeslurm.orchestrator.environments.sandbox.port_forwarding import (
    PortForwarder,
    PrivateLoopback,
    SandboxGoneError,
)
from primeslurm.recipe.sections.sandboxes import Limits

log = logging.getLogger(__name__)

# Environment variables: each instance gets a network of its own, with nothing but a loopback. Its user may enter it,
# even if apptainer is installed setuid.
PRIVATE_NETWORK = {"APPTAINER_NET": "1", "APPTAINER_NETWORK": "none", "APPTAINER_USERNS": "1"}
# Command of util-linux that enters namespaces.
NSENTER = "nsenter"
# Programs that a disk of fixed size needs. Packages of apptainer may bring the first two.
DISK_PROGRAMS = ("fuse2fs", "fuse-overlayfs", "mke2fs")
# Directories that are not on every user's PATH.
_ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
_ISOLATION = ("--cleanenv", "--containall", "--no-mount", "cwd,hostfs,bind-paths,home,tmp", "--no-eval")
_INODE_BYTES = 4096
_COPY = 'if [ -d "$1" ]; then cp -R -P "$1"/. "$2"/; fi'
_ENTER_TIMEOUT_S = 30
_MAKE_SOCKET = """
import socket, sys
made = socket.socket()
if port := int(sys.argv[2]):
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    made.listen(64)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"."], [made.fileno()])
"""


class PrivateNetwork(PrivateLoopback):
    """Mixin of instances with a network of their own. The worker forwards connections to the rollout's endpoints."""

    _instance: str

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._forwarder = PortForwarder(self._make_socket)
        self._ports: set[int] = set()
        self._lock = asyncio.Lock()

    async def expose(self, port: int) -> str:
        return f"http://127.0.0.1:{await self._forwarder.expose(port)}"

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        await self._forward_ports()
        result: ProgramResult = await super().run(argv, env)  # type: ignore[misc]
        return result

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        await self._forward_ports()
        process: RuntimeProcess = await super().open_process(argv, env)  # type: ignore[misc]
        return process

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        await self._forward_ports()
        await super().run_background(argv, env, log)  # type: ignore[misc]

    async def teardown(self) -> None:
        self._forwarder.close()
        await super().teardown()  # type: ignore[misc]

    async def _forward_ports(self) -> None:
        async with self._lock:  # programs of a rollout may start at the same time
            try:
                for port in sorted(self._ports):
                    await self._forwarder.forward(port)
            except SandboxGoneError as error:
                raise SandboxError(str(error)) from error

    async def _make_socket(self, port: int | None) -> socket.socket:
        # Only `instance list` tells the pid of the instance's first process.
        listed = await cli("apptainer", "instance", "list", self._instance)
        rows = [line.split() for line in listed.stdout.splitlines()]
        pids = [row[1] for row in rows if row[:1] == [self._instance] and row[1].isdigit()]
        if not pids:
            raise SandboxGoneError(f"apptainer does not list the instance: {listed.stderr.strip()[-300:]}")
        return await _socket_in_network(int(pids[0]), port)


async def _socket_in_network(pid: int, port: int | None) -> socket.socket:
    """Create a TCP socket that listens on a port of a process's network, or is unconnected. Raise SandboxGoneError."""
    # A helper enters the process's namespaces, creates the socket and passes it back. This needs no privilege if the
    # user namespace belongs to this user.
    worker_end, helper_end = socket.socketpair()
    with worker_end:
        with helper_end:
            enter = [NSENTER, f"--user=/proc/{pid}/ns/user", f"--net=/proc/{pid}/ns/net", "--preserve-credentials"]
            make = [sys.executable, "-I", "-S", "-c", _MAKE_SOCKET, str(helper_end.fileno()), str(port or 0)]
            process = await asyncio.create_subprocess_exec(
                *(*enter, "--", *make),
                env={"PATH": os.environ.get("PATH", os.defpath)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[helper_end.fileno()],
            )
        try:
            async with asyncio.timeout(_ENTER_TIMEOUT_S):
                _, stderr = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            why = (stderr.decode(errors="replace").strip().splitlines() or ["no error message"])[-1]
            raise SandboxGoneError(f"cannot enter the container's network: {why}")
        _, fds, _, _ = socket.recv_fds(worker_end, 1, 1)
    received = socket.socket(fileno=fds[0])
    received.setblocking(False)
    return received


class LimitProbe:
    """Finds out whether apptainer can limit cores and memory on this node.

    apptainer delegates that to systemd, in a user session that few jobs have. Without a session, an instance with
    limits does not start.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._problem: str | None = None

    async def problem(self, image: str) -> str:
        """Return why apptainer cannot set limits; empty if it can. The first call tries it with a SIF file."""
        async with self._lock:
            if self._problem is None:
                trial = await cli("apptainer", "exec", "--containall", "--memory", "1g", image, "true")
                lines = [line for line in trial.stderr.splitlines() if "cgroup" in line]
                self._problem = lines[-1].rpartition("FATAL:")[2].strip() if trial.exit_code and lines else ""
                if self._problem:
                    log.warning(
                        "apptainer cannot limit cores and memory here, so limits of tasks are ignored. %s",
                        self._problem,
                    )
        return self._problem


class FixedSizeDisk(ApptainerRuntime):  # type: ignore[misc]
    """An apptainer runtime that enforces `disk_gb` with an ext3 file system in a sparse file.

    verifiers gives an instance directories of the node, and nothing bounds their size. Here, everything that programs
    write goes to an overlay of fixed size, including their working directory, /tmp and the home directory. apptainer
    mounts it without privileges through fuse2fs.
    """

    config: ApptainerConfig
    limits: ClassVar[Limits]
    _instance: str
    _dir: Path | None

    async def start(self) -> None:
        """Start the instance, with a disk of fixed size if the recipe sets `disk_gb`. Raises SandboxError."""
        if self.limits.disk_gb is None:
            await super().start()
            return
        self._dir = Path(tempfile.mkdtemp(prefix="vf-apptainer-"))
        image = await self._image()
        script = await _apptainer("inspect", "--startscript", image)
        if any(line.strip() and not line.lstrip().startswith("#") for line in script.splitlines()):
            raise SandboxError("Apptainer requires an image without a startscript")  # verifiers' own message
        disk = self._dir / "disk.img"
        await self._make_disk(disk, image, round(self.limits.disk_gb * GB))
        options = [] if self.config.cpu is None else ["--cpus", str(self.config.cpu)]
        options += [] if self.config.memory is None else ["--memory", f"{self.config.memory}g"]
        options += ["--nv"] if parse_gpu(self.config.gpu)[1] else []
        await _apptainer("instance", "start", *_ISOLATION, "--overlay", str(disk), *options, image, self._instance)
        self.info.id = self._instance

    async def _make_disk(self, disk: Path, image: str, size: int) -> None:
        """Create a disk with the image's working directory, owned by this user."""
        # mke2fs fills the disk while it formats it. Files of the image belong to root, and this user could not change
        # them through the overlay.
        assert self._dir is not None and self.config.workdir is not None
        files = self._dir / "files"
        workdir = files / "upper" / self.config.workdir.lstrip("/")
        for path in (files / "work", workdir, files / "upper" / str(Path.home()).lstrip("/")):
            path.mkdir(parents=True, exist_ok=True)
        for name in ("tmp", "var/tmp"):
            path = files / "upper" / name
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o1777)
        target = f"/{self._instance}"
        bind = ("--bind", f"{workdir}:{target}")
        await _apptainer("exec", *_ISOLATION, *bind, image, "sh", "-c", _COPY, "copy", self.config.workdir, target)
        # Sparse: blocks take space only once programs write to them.
        with disk.open("wb") as file:
            file.truncate(size)
        # A small journal and no blocks reserved for root, so that nearly all of the size is usable.
        options = ["-q", "-F", "-t", "ext3", "-m", "0", "-b", "4096", "-i", str(_INODE_BYTES), "-J", "size=4"]
        owner = f"root_owner={os.getuid()}:{os.getgid()}"
        program = find_program("mke2fs") or "mke2fs"
        result = await cli(program, *options, "-E", owner, "-d", str(files), str(disk))
        if result.exit_code:
            why = f"runtime.limits.disk_gb is too small for the image's files in {self.config.workdir}"
            raise SandboxError(f"{why}: {result.stderr.strip()[-300:]}")
        await asyncio.to_thread(shutil.rmtree, files)


async def _apptainer(*words: str) -> str:
    """Run an apptainer command and return its output. Raises SandboxError."""
    result = await cli("apptainer", *words)
    if result.exit_code:
        raise SandboxError(f"apptainer {words[0]} failed: {result.stderr.strip()[-2000:]}")
    return str(result.stdout)


def find_program(program: str) -> str | None:
    """Find one of `DISK_PROGRAMS` where apptainer would find it."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), _ADMIN_PATH, *_bundled_programs()]))


def missing_for_disks() -> list[str]:
    missing = [program for program in DISK_PROGRAMS if find_program(program) is None]
    return missing if os.access("/dev/fuse", os.R_OK | os.W_OK) else [*missing, "/dev/fuse"]


@functools.cache
def _bundled_programs() -> tuple[str, ...]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["apptainer", "buildcfg", "LIBEXECDIR"]
        libexec = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=True
        ).stdout.strip()
        return (f"{libexec}/apptainer/bin",) if libexec else ()
    return ()

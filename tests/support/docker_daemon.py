"""A real docker daemon in its own namespaces, so that the machine's network and mounts stay unchanged."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 600.0
_NAMESPACES = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)


def lacking() -> str:
    """Return why docker cannot run here; empty if it can."""
    needed = ("docker", "dockerd", "containerd", "ip", "setpriv", "unshare")
    absent = [name for name in needed if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed"
    tried = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"a docker daemon needs root: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Run a daemon, and yield the address of its socket for `DOCKER_HOST`. `directory` needs a short path."""
    address = f"unix://{directory}/docker.sock"
    places = ("data-root", "exec-root", "pidfile")
    words = ["dockerd", "--host", address, *(word for name in places for word in (f"--{name}", f"{directory}/{name}"))]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*_NAMESPACES, "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait_until_it_answers(process, address, directory / "log")
        yield address
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    ends = time.monotonic() + PATIENCE_S
    while subprocess.run(["docker", "--host", address, "info"], capture_output=True, check=False).returncode:
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"dockerd does not answer: {log.read_text()[-2000:]}")
        time.sleep(0.1)

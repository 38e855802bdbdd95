"""A real docker daemon for tests, in namespaces of its own: the machine's network and mounts stay as they are."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 60.0
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
    """Say why none can be started here; empty if one can."""
    needed = ("docker", "dockerd", "containerd", "ip", "setpriv", "unshare")
    absent = [name for name in needed if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed"
    tried = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"a docker daemon needs root: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Start a daemon, and end it and all its containers afterwards.

    Args:
        directory: for its files, of a short path: a socket is there.

    Yields:
        The address of its socket, as `DOCKER_HOST` says it.
    """
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

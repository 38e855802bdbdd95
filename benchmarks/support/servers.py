"""Real servers on this machine, with the command lines of a plan."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.support.ports import HOST, free_port
from primeslurm.node.host.shared_memory import SharedMemory
from primeslurm.plan.commands.command import Command
from primeslurm.testbed.embedded_slurm.daemons import state_and_start
from primeslurm.wire.transport import secret

# Values that an agent knows about this machine.
NODE_VALUES = {
    "generate_token": secret.generate_token(secret.own_secret()),
    "run_id": "test-run",
    "node": "0",
    "key": "abcdef",
    "interface": "",
    "hcas": "",
    "ucx_devices_near": "",
}


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace `${name}` placeholders. Raise KeyError for one without a value."""
    return re.sub(r"\$\{([^}]+)\}", lambda match: values[match[1]], text)


@dataclass
class Server:
    """A server process, the leader of its process group, identified by pid and start time.

    On a busy machine pids are reused within minutes.
    """

    pid: int
    url: str
    log: Path
    started: int | None = field(init=False)
    """Start time [clock ticks since boot]; None for a process that ended at once."""

    def __post_init__(self) -> None:
        found = state_and_start(self.pid)
        self.started = found[1] if found else None

    def status_code(self, path: str = "/health") -> int | None:
        """Return the HTTP status of a GET; None if there is no response."""
        try:
            # plain HTTP, so no certificates are read
            return httpx.get(self.url + path, headers=secret.header(), timeout=5, verify=False).status_code
        except httpx.HTTPError:
            return None

    def wait(self, path: str, timeout_s: float = 600) -> float:
        """Wait for a 200 on `path`, and return the seconds. Raise RuntimeError with the end of the log."""
        began = time.monotonic()
        while self.status_code(path) != 200:
            if not self.alive() or time.monotonic() - began > timeout_s:
                raise RuntimeError(f"{self.url}{path} never answered:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        return time.monotonic() - began

    def alive(self) -> bool:
        found = state_and_start(self.pid)
        if found is None or found[1] != self.started:
            return False
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        return found[0] not in "ZX"  # not a child of this process

    def kill(self) -> None:
        """Send SIGKILL to the whole group, and wait until it and its shared memory are gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM to the group, and SIGKILL to processes that do not end."""
        self._end(signal.SIGTERM)

    def _end(self, first: signal.Signals) -> None:
        if self._replaced():
            return
        memory = SharedMemory()
        memory.scan([self.pid])
        self._signal(first)
        self._gone(10)
        self._signal(signal.SIGKILL)
        self._gone(10)
        memory.ended(self.pid)
        memory.unlink_within(10)

    def wait_gone(self, timeout_s: float) -> bool:
        """Return whether the process ends by itself in time."""
        return self._gone(timeout_s)

    def _replaced(self) -> bool:
        """Return whether a later process has this pid, which is impossible while any process of the group exists."""
        found = state_and_start(self.pid)
        return found is not None and found[1] != self.started

    def _signal(self, number: signal.Signals) -> None:
        if not self._replaced():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def start_process(
    command: Command, elsewhere: Mapping[str, str], log: Path, ports: Mapping[str, int] | None = None
) -> Server:
    """Start any planned process that serves HTTP. `elsewhere` has placeholders of other processes."""
    numbers = {name: free_port() for name in command.ports} | dict(ports or {})
    values = NODE_VALUES | {"host": HOST, "python": sys.executable, "tmp": str(log.parent)}
    values |= {"attempt_dir": str(log.parent)} | dict(elsewhere)
    values |= {f"port:{name}": str(number) for name, number in numbers.items()}
    for name, text in command.files.items():
        (log.parent / name).write_text(fill(text, values))
    with log.open("a") as handle:
        process = subprocess.Popen(
            [fill(part, values) for part in command.argv],
            stdout=handle,
            stderr=subprocess.STDOUT,
            env={**os.environ, **{key: fill(value, values) for key, value in command.env.items()}},
            start_new_session=True,
        )
    return Server(process.pid, f"http://{HOST}:{numbers['http']}", log)


def start_engine(
    command: Command,
    log: Path,
    gpu: int = 0,
    elsewhere: Mapping[str, str] | None = None,
    ports: Mapping[str, int] | None = None,
) -> Server:
    """Start an engine that uses only token ids, for a model without a tokenizer.

    `elsewhere` has placeholders of other processes, and `ports` those that others already know.
    """
    own = {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd()))}
    argv = (*command.argv, "--skip-tokenizer-init")
    return start_process(command._replace(argv=argv, env={**command.env, **own}), elsewhere or {}, log, ports)


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that an agent sets for one trainer rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }

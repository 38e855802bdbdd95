"""Attacks that another Unix user of a node may try on a run: on its directory, its processes and its local files.

Each attack is tried on each target. Harmless attacks are first tried as the owner and must work, so that a refusal is
due to the user.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from primeslurm.run.directory import RunDirectory
from tests.support.strangers import attempted

_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17
_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Targets:
    """Targets of attacks: the parts of a running run on this machine."""

    run: Path
    pids: tuple[int, ...]
    places: tuple[Path, ...]
    """Directories of its agents on the node's disk."""
    memory: tuple[Path, ...]
    """Files of this user in /dev/shm."""
    claims: tuple[str, ...]
    """Abstract socket names that reserve the run's ports."""

    @classmethod
    def of(cls, run: Path) -> Targets:
        directory = RunDirectory(run)
        reports = directory.attempt(1).heartbeats()
        pids = [report.agent_pid for report in reports if report.agent_pid]
        pids += [process.pid for report in reports for process in report.processes.values() if process.pid]
        shared = filter(_is_own_file, Path("/dev/shm").iterdir())
        names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
        names += [" ".join(line.split()[-2:]) for line in Path("/proc/net/unix").read_text().splitlines()]
        return cls(
            run=run,
            pids=tuple(pids),
            places=tuple(Path(tempfile.gettempdir()).glob(f"primeslurm-{directory.run_id}-1-a*")),
            memory=tuple(shared),
            claims=tuple(name for name in names if name.startswith("@primeslurm ")),
        )


@dataclass(frozen=True)
class Trial:
    """An attack on each of some targets. `act` raises OSError if it is refused. A `harmless` attack may be tried as the
    owner.
    """

    name: str
    targets: Callable[[Targets], Iterable[object]]
    act: Callable[[object], object]
    harmless: bool = False

    def try_all(self, targets: Targets) -> list[str]:
        """Try the attack on all targets, and return those on which it worked."""
        attacked = []
        for target in self.targets(targets):
            with contextlib.suppress(OSError):
                self.act(target)
                attacked.append(str(target))
        return attacked


def successful_attacks(targets: Targets) -> dict[str, list[str]]:
    """Try all attacks as a stranger, and return the targets of each attack that worked.

    An entry `as owner: NAME` is an attack that did not even work for the owner, so that it proves nothing.
    """
    successes = {}
    for trial in TRIALS:
        if trial.harmless and not trial.try_all(targets):
            successes[f"as owner: {trial.name}"] = ["nowhere"]
        attack = attempted(lambda: trial.try_all(targets))  # noqa: B023
        assert attack.succeeded, attack.trace
        if attack.value:
            successes[trial.name] = attack.value
    return successes


def _is_own_file(path: Path) -> bool:
    with contextlib.suppress(OSError):  # other tests create and remove files there
        return path.is_file() and path.stat().st_uid == os.geteuid()
    return False


def _read(path: object) -> bytes:
    with Path(str(path)).open("rb") as file:
        return file.read(1)


def _in_proc(name: str) -> Callable[[Targets], Iterable[object]]:
    return lambda targets: [f"/proc/{pid}/{name}" for pid in targets.pids]


def _files(targets: Targets) -> Iterable[object]:
    names = ("secret", "lock.json", "recipe.yaml", "attempts/1/plan.json", "attempts/1/addresses.json", "metrics.jsonl")
    return (
        [targets.run / name for name in names]
        + list(targets.run.glob("submitit/*"))
        + list(targets.run.glob("slurm-*.out"))
    )


def _new(targets: Targets) -> Iterable[object]:
    planted = ("attempts/1/cancel", "attempts/1/fleet.json", "submitit/1_submitted.pkl", "secret", "checkpoints/x")
    return [
        *(targets.run / name for name in planted),
        targets.run.parent / "x",
        targets.run.parent / ".bad-nodes" / "n.json",
    ]


def _link(path: object) -> None:
    (Path(str(path)) / "vllm").symlink_to("/tmp")


def _rename(path: object) -> None:
    Path(str(path)).rename(f"{path}-aside")


def _system(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def _trace(pid: object) -> None:
    _system(_LIBC.ptrace(_PTRACE_ATTACH, pid, None, None))
    _LIBC.ptrace(_PTRACE_DETACH, pid, None, None)


def _take_descriptors(pid: object) -> None:
    handle = os.pidfd_open(int(str(pid)))
    _system(_LIBC.syscall(_PIDFD_GETFD, handle, 1, 0))


def _connect(name: object) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(name).replace("@", "\0", 1))


def _pids(targets: Targets) -> Iterable[object]:
    return targets.pids


TRIALS = (
    Trial("list the run directory", lambda targets: [targets.run], lambda path: os.listdir(str(path)), True),  # noqa: PTH208
    Trial("read what is in it", _files, _read, True),
    Trial("write or plant files in it", _new, lambda path: Path(str(path)).open("ab").close()),
    Trial("put another in its place", lambda targets: [targets.run], _rename),
    Trial("open it", lambda targets: [targets.run], lambda path: Path(str(path)).chmod(0o777)),
    Trial("list directories on the disk", lambda targets: targets.places, lambda path: os.listdir(str(path)), True),  # noqa: PTH208
    Trial("plant links there", lambda targets: targets.places, _link),
    Trial("put others in their place", lambda targets: targets.places, _rename),
    Trial("read environments", _in_proc("environ"), _read, True),
    Trial("read maps", _in_proc("maps"), _read, True),
    Trial("open memory", _in_proc("mem"), lambda path: Path(str(path)).open("rb").close(), True),
    Trial("list descriptors", _in_proc("fd"), lambda path: os.listdir(str(path)), True),  # noqa: PTH208
    Trial("enter working directories", _in_proc("cwd"), lambda path: os.listdir(str(path)), True),  # noqa: PTH208
    Trial("open descriptors", _in_proc("fd/1"), lambda path: Path(str(path)).open("ab").close(), True),
    Trial("end processes", _pids, lambda pid: os.kill(int(str(pid)), signal.SIGKILL)),
    Trial("stop processes", _pids, lambda pid: os.kill(int(str(pid)), signal.SIGSTOP)),
    Trial("slow processes down", _pids, lambda pid: os.setpriority(os.PRIO_PROCESS, int(str(pid)), 19)),
    Trial("move them to one core", _pids, lambda pid: os.sched_setaffinity(int(str(pid)), {0})),
    Trial("trace processes", _pids, _trace),
    Trial("take descriptors", _pids, _take_descriptors),
    Trial("open shared memory", lambda targets: targets.memory, lambda path: Path(str(path)).open("r+b").close()),
    Trial("unlink shared memory", lambda targets: targets.memory, lambda path: Path(str(path)).unlink()),
    Trial("connect to claims of ports", lambda targets: targets.claims, _connect),
)

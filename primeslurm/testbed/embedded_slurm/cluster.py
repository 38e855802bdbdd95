"""Starts and stops embedded clusters: munged, slurmctld and one slurmd per node, in a private directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml

from primeslurm.base.errors import ClusterError, UsageError, Violation
from primeslurm.base.files import read_json, write_json
from primeslurm.base.paths import is_file
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.environment import clean
from primeslurm.testbed.embedded_slurm import config, page_merging
from primeslurm.testbed.embedded_slurm.config import ClusterSpec
from primeslurm.testbed.embedded_slurm.daemons import OsProcess, end, job_processes

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_STATE = "cluster.json"
_LOCK = Path("/run/primeslurm-cluster-up.lock")
# Long, because a machine that is busy with other clusters may be slow. An ended daemon is noticed at once.
_START_TIMEOUT_S = 300.0
# A daemon writes its pid file right after it has detached, and removes the file if it fails later.
_PID_FILE_TIMEOUT_S = 60.0
# Slurm's KillWait of 30 s, in which trainers write a last checkpoint, plus a margin.
_CANCEL_WAIT_S = 33.0


def default_directory(name: str) -> Path:
    return Path.home() / ".primeslurm" / "clusters" / name


def known_directories() -> list[Path]:
    """Return the directories of all clusters that were started in their default directory."""
    return sorted(file.parent for file in default_directory("*").parent.glob(f"*/{_STATE}"))


@dataclass(frozen=True)
class ClusterStatus:
    """State of an embedded cluster: which daemons run, and Slurm's state of each node."""

    name: str
    directory: str
    site_file: str
    slurm_conf: str
    daemons: dict[str, bool]
    """Whether each daemon is alive."""
    nodes: dict[str, str]
    """Slurm's state of each node; empty if the controller does not answer."""

    @property
    def up(self) -> bool:
        return bool(self.daemons) and all(self.daemons.values())


class ClusterRecord(msgspec.Struct, frozen=True):
    """Content of `cluster.json`."""

    spec: ClusterSpec
    place: int
    """Index of the `LoopbackPlace`."""
    daemons: list[OsProcess]


@dataclass
class Cluster:
    """An embedded cluster. `up` starts one, `Cluster.load` reads one from its directory."""

    spec: ClusterSpec
    place: config.LoopbackPlace
    daemons: list[OsProcess] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path) -> Cluster:
        """Load the cluster of a directory, whether it is up or not. Raise UsageError if there is none."""
        state = directory / _STATE
        if not state.is_file():
            why = "holds no embedded cluster"
            fix = "`primeslurm cluster status` lists those of this user; `primeslurm cluster up` starts one"
            raise UsageError([Violation("directory", str(directory), why, fix)])
        try:
            record = msgspec.convert(read_json(state), ClusterRecord, dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            raise UsageError([Violation("directory", str(directory), f"{_STATE} in it is damaged: {error}")]) from error
        return cls(record.spec, config.LoopbackPlace(record.place), record.daemons)

    @classmethod
    def of_slurm_conf(cls, slurm_conf: str) -> Cluster | None:
        """Return the embedded cluster that a slurm.conf belongs to; None if it belongs to another Slurm."""
        directory = Path(slurm_conf).parent
        if not is_file(directory / _STATE):
            return None
        cluster = cls.load(directory)
        return cluster if cluster.spec.slurm_conf == Path(slurm_conf) else None

    @property
    def client(self) -> SlurmClient:
        return SlurmClient(str(self.spec.slurm_conf))

    def status(self) -> ClusterStatus:
        nodes: dict[str, str] = {}
        with contextlib.suppress(ClusterError):
            nodes = {node.name: node.state for node in self.client.nodes()}
        return ClusterStatus(
            name=self.spec.name,
            directory=str(self.spec.directory),
            site_file=str(self.spec.site_file),
            slurm_conf=str(self.spec.slurm_conf),
            daemons={daemon.name: daemon.alive for daemon in self.daemons},
            nodes=nodes,
        )

    def down(self) -> None:
        """Cancel all jobs, end all daemons, and remove the directory of this cluster."""
        if any(daemon.name == "slurmctld" and daemon.alive for daemon in self.daemons):
            with contextlib.suppress(ClusterError):
                self.client.cancel_all()
                deadline = time.monotonic() + _CANCEL_WAIT_S
                while job_processes(self.spec.slurm_conf) and time.monotonic() < deadline:
                    time.sleep(0.1)
        # Processes that survive the cancellation would run on without a cluster.
        end(job_processes(self.spec.slurm_conf), grace_s=2.0)
        end(self.daemons, grace_s=5.0)
        shutil.rmtree(self.spec.directory)

    def _save(self) -> None:
        record = ClusterRecord(self.spec, self.place.index, self.daemons)
        write_json(self.spec.directory / _STATE, msgspec.to_builtins(record, enc_hook=str))

    def _write_files(self) -> None:
        spec, place = self.spec, self.place
        for name in ("munge", "state", "spool", "pid", "log", "devices"):
            (spec.directory / name).mkdir(parents=True, exist_ok=True)
        self._save()
        for index in range(spec.gpus_per_node):
            (spec.directory / "devices" / f"gpu{index}").symlink_to("/dev/null")
        key = spec.directory / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        hostname = socket.gethostname().partition(".")[0]
        spec.slurm_conf.write_text(config.slurm_conf(spec, place, hostname, memory_mb))
        (spec.directory / "gres.conf").write_text(config.gres_conf(spec))
        (spec.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        spec.site_file.write_text(self.site_text())

    def site_text(self) -> str:
        """Return the content of this cluster's site file."""
        site = config.site(self.spec, self.place).model_dump(by_alias=True, exclude_defaults=True, mode="json")
        return yaml.safe_dump({"schema": 1, **site}, sort_keys=False)

    def _start(self, name: str, argv: list[str], pid_file: Path, log: Path) -> None:
        """Start a daemon that detaches itself, and record its pid before the next one starts."""
        # The cluster may be started from within a job. Its daemons must not take over the job's SLURM_* variables.
        environment = clean(os.environ, str(self.spec.slurm_conf))
        with log.open("ab") as stream:
            code = subprocess.run(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                preexec_fn=page_merging.ask if self.spec.merge_pages else None,
            ).returncode
        deadline = time.monotonic() + _PID_FILE_TIMEOUT_S
        while code == 0 and time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                process = OsProcess.of(name, int(pid_file.read_text()))
                if process is not None:
                    self.daemons.append(process)
                    self._save()
                    return
            time.sleep(0.02)
        raise ClusterError(f"{name} did not start (exit code {code}). Its log ends:\n{_tail(log)}")

    def _start_controllers(self) -> None:
        directory = self.spec.directory
        munge = directory / "munge"
        self._start(
            "munged",
            [
                *("munged", "--force", f"--num-threads={self.spec.munge_threads}"),
                f"--socket={self.spec.munge_socket}",
                *(f"--key-file={munge}/key", f"--seed-file={munge}/seed"),
                *(f"--pid-file={directory}/pid/munged", f"--log-file={directory}/log/munged.log"),
            ],
            directory / "pid/munged",
            directory / "log/munged.log",
        )
        self._start_slurmctld()

    def _start_slurmctld(self) -> None:
        directory = self.spec.directory
        argv = ["slurmctld", "-f", str(self.spec.slurm_conf)]
        self._start("slurmctld", argv, directory / "pid/slurmctld", directory / "log/slurmctld.log")
        self._wait(self.client.ping, _START_TIMEOUT_S, "slurmctld does not answer")

    def _start_nodes(self) -> None:
        directory = self.spec.directory
        for name in self.spec.control_names + self.spec.gpu_names:
            argv = ["slurmd", "-f", str(self.spec.slurm_conf), "-N", name]
            self._start(name, argv, directory / "pid" / name, directory / "log" / f"{name}.log")

    def _all_idle(self) -> bool:
        with contextlib.suppress(ClusterError):
            return all(node.state == "idle" and node.responding for node in self.client.nodes())
        return False

    def _wait(self, condition: Callable[[], bool], timeout_s: float, problem: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            dead = next((daemon.name for daemon in self.daemons if not daemon.alive), None)
            if dead or time.monotonic() > deadline:
                name = dead or "slurmctld"
                log = _tail(self.spec.directory / "log" / f"{name}.log")
                raise ClusterError(f"{f'{dead} ended' if dead else problem}. The log of {name} ends:\n{log}")
            time.sleep(0.1)


def up(spec: ClusterSpec) -> tuple[Cluster, bool]:
    """Start a cluster and wait until all nodes are idle.

    Returns:
        The cluster, and False if it was already up.

    Raises:
        UsageError: the specification is wrong, programs are missing, or the directory is in use.
        ClusterError: a daemon did not start. The error has the end of its log, and the directory has been removed.
    """
    spec.check()
    _check_machine()
    if (spec.directory / _STATE).is_file():
        existing = Cluster.load(spec.directory)
        if existing.status().up and existing.spec == spec:
            return existing, False
        why = "holds a cluster with other settings" if existing.status().up else "holds a cluster that is not fully up"
        raise UsageError([Violation("directory", str(spec.directory), why, "end it with primeslurm cluster down")])
    if spec.directory.exists() and any(spec.directory.iterdir()):
        raise UsageError([Violation("directory", str(spec.directory), "exists and is not empty", "choose another")])
    cluster = None
    try:
        with _start_lock():
            cluster = Cluster(spec, _free_place(spec))
            cluster._write_files()
            cluster._start_controllers()
            cluster._start_nodes()
        cluster._wait(cluster._all_idle, _START_TIMEOUT_S, "not all nodes became idle")
    except BaseException:
        if cluster is not None:
            cluster.down()
        raise
    return cluster, True


def _check_machine() -> None:
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        fix = "on Debian or Ubuntu: apt-get install slurm-wlm munge"
        raise UsageError([Violation("slurm", "", f"not installed: {', '.join(missing)}", fix)])
    if os.geteuid() != 0:
        raise UsageError([Violation("user", str(os.geteuid()), "Slurm's daemons need root to start jobs")])


def _free_place(spec: ClusterSpec) -> config.LoopbackPlace:
    for index in [config.PLACES] if spec.wide else range(config.PLACES):
        place = config.LoopbackPlace(index)
        if all(_is_free(port) for port in place.ports(spec)):
            return place
    if spec.wide:
        raise ClusterError(f"another cluster of more than {config.NARROW_NODES} nodes is up on this machine")
    raise ClusterError(f"all {config.PLACES} places for embedded clusters on this machine are taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def _start_lock() -> Iterator[None]:
    """Serialise the start of clusters, because each looks for free ports first. The lock ends with its process."""
    with os.fdopen(os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o600)) as lock:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(f"another cluster has been starting for {_START_TIMEOUT_S:.0f} s") from error
                time.sleep(0.1)
        yield


def _tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"

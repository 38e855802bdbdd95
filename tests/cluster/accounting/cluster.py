"""The daemons of the cluster: munged, MariaDB, slurmdbd, slurmctld, and a slurmd per node."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from benchmarks.support.ports import free_port
from primeslurm.run.directory import RunDirectory
from primeslurm.slurm.client import SlurmClient
from primeslurm.testbed.embedded_slurm.daemons import end, job_processes
from tests.cluster.accounting.namespace import UID, UserNamespace, python_directories
from tests.support.unmeasured import unmeasured
from tests.support.waiting import wait_until

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]
PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sacctmgr")
NODES = {f"gpu-0{number}": f"127.0.1.10{number}" for number in (1, 2, 3)}
GRACE_S = 40
"""GraceTime of the QOS that can be preempted [s]."""


class AccountingCluster:
    """A started cluster. `directory` is an empty directory for all files of the daemons.

    Raises:
        OSError: this machine allows no mount namespaces.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.conf = directory / "slurm.conf"
        self.runs = directory / "runs"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._serial = 0
        for name in ("munge", "state", "spool", "devices", "runs", "log"):
            (directory / name).mkdir()
        os.chown(self.runs, UID, UID)
        for index in range(2):
            (directory / "devices" / f"gpu{index}").symlink_to("/dev/null")
        self.namespace = UserNamespace(directory, [CHECKOUT, *python_directories()])
        self._write_files()
        try:
            self._start_all()
        except BaseException:
            self.down()
            raise

    @property
    def client(self) -> SlurmClient:
        """Slurm's commands, as root."""
        return SlurmClient(str(self.conf))

    # commands of the ordinary user

    def as_user(
        self, *argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        base = {name: value for name, value in unmeasured().items() if name in ("PATH", "LANG", "OMP_NUM_THREADS")}
        base |= {"SLURM_CONF": str(self.conf), "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}
        command = self.namespace.as_user(argv, {**base, "COLUMNS": "160", **env}, cwd or self.namespace.home)
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def primeslurm(self, *args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `primeslurm ARGS` as the ordinary user."""
        return self.as_user(sys.executable, "-m", "primeslurm", *args, **options)

    def site(self, *, partition: str = "gpu", **slurm: Any) -> Path:
        """Write a site file of the user with these options for every job (`account`, `qos`, `time` ...)."""
        site = {
            "schema": 1,
            "name": "lab",
            "device": "cpu",
            "runs": str(self.runs),
            "slurm_conf": str(self.conf),
            "nodes": {"default": {"partition": partition, "gpus": 2, "cpus": 4, "gres": "gpu:h100"}},
            "slurm": {"account": "lab7", "time": "01:00:00", **slurm},
            "network": {"addresses": NODES},
        }
        self._serial += 1
        return self._users_file(f"site-{self._serial}.yaml", site)

    def recipe(self, **changes: Any) -> Path:
        """Write a recipe of the user: a small run with a checkpoint only at its end."""
        recipe = {
            "schema": 1,
            "name": "small",
            "max_steps": 1000,
            "seq_len": 512,
            "model": {"path": "/models/none"},
            "environments": [{"id": "swe", "workers": 1}],
            "orchestrator": {"batch_size": 4, "group_size": 2, "max_off_policy_steps": 4},
            "checkpoint": {"interval": 1000},
            "deployment": {
                "train": {"nodes": 1, "gpus_per_node": 1},
                "inference": {"type": "multi_node", "gpus_per_node": 1},
            },
            "monitor": {"tensorboard": False},
            **changes,
        }
        self._serial += 1
        return self._users_file(f"recipe-{self._serial}.yaml", recipe)

    def submit(self, site: Path, *options: str, **recipe: Any) -> RunDirectory:
        """Submit an emulated run as the ordinary user. Fail if it is refused."""
        path = self.recipe(**recipe)
        words = ("submit", path, "--emulate", "--site", site, "--name", f"run-{self._serial}", "--json", *options)
        done = self.primeslurm(*words)
        assert done.returncode == 0, done.stderr
        return RunDirectory(Path(json.loads(done.stdout)["directory"]))

    def hold(self, nodes: int, qos: str = "urgent", script: str = "sleep 600", *options: str) -> str:
        """Submit a job as root that takes whole nodes, and return its id."""
        words = (
            "--parsable",
            f"--qos={qos}",
            "--account=lab7",
            f"--nodes={nodes}",
            "--exclusive",
            "--output=/dev/null",
        )
        return self._slurm("sbatch", *words, *options, f"--wrap={script}", cwd="/").strip()

    def as_root(self, *argv: str) -> str:
        """Run a command as root, and return its output. Fail if the command fails."""
        return self._slurm(*argv)

    def _users_file(self, name: str, content: object) -> Path:
        path = self.namespace.home / name
        path.write_text(yaml.safe_dump(content))
        return path

    # daemons

    def down(self) -> None:
        """End all jobs, then all daemons, by process id."""
        if self._is_up("slurmctld") and self.client.ping():
            self.client.cancel_all()
            with contextlib.suppress(AssertionError):  # those that are left are killed below
                wait_until(lambda: not job_processes(self.conf), timeout_s=10.0)
        end(job_processes(self.conf), grace_s=2.0)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.namespace.close()

    def _write_files(self) -> None:
        key = self.directory / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        values = {"directory": str(self.directory), "host": socket.gethostname().partition(".")[0]}
        names = ("ctld_port", "dbd_port", *(f"{name.replace('-', '_')}_port" for name in NODES))
        values |= {name: str(free_port()) for name in names}
        for name in ("slurm.conf", "slurmdbd.conf", "gres.conf"):
            text = Template((HERE / name).read_text()).substitute(values)
            (self.directory / name).write_text(text)
        (self.directory / "slurmdbd.conf").chmod(0o600)
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_all(self) -> None:
        data, database = self.directory / "database", self.directory / "database.sock"
        self._start_munged()
        install = ("--user=root", f"--datadir={data}", "--auth-root-authentication-method=normal", "--skip-test-db")
        subprocess.run(
            ["mariadb-install-db", "--no-defaults", *install, "--skip-name-resolve"], check=True, capture_output=True
        )
        files = (f"--datadir={data}", f"--socket={database}", f"--pid-file={self.directory}/mariadbd.pid")
        small = ("--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0", "--performance-schema=OFF")
        self._start("mariadbd", "--no-defaults", "--user=root", "--skip-networking", *files, *small)
        wait_until(database.exists, self._tail("mariadbd"))
        self._start("slurmdbd", "-D", env={"MYSQL_UNIX_PORT": str(database)})
        wait_until(lambda: self._try("sacctmgr", "--noheader", "list", "cluster"), self._tail("slurmdbd"))
        self._slurm("sacctmgr", "--immediate", "--quiet", "add", "cluster", "lab")
        self._start("slurmctld", "-D")
        wait_until(self.client.ping, self._tail("slurmctld"))
        # slurmdbd learns of gres/gpu only now
        for line in (HERE / "associations.txt").read_text().splitlines():
            if line and not line.startswith("#"):
                words = Template(line).substitute(grace_s=GRACE_S).split()
                self._slurm("sacctmgr", "--immediate", "--quiet", *words)
        for name in NODES:
            self._start("slurmd", "-D", "-N", name, daemon=name)
        wait_until(self._all_idle, self._tail("slurmctld"))

    def _start_munged(self) -> None:
        directory = self.directory / "munge"
        directory.chmod(0o755)
        files = (f"--socket={directory}/socket", f"--key-file={directory}/key", f"--seed-file={directory}/seed")
        more = (f"--pid-file={directory}/pid", f"--log-file={directory}/log")
        self._start("munged", "--foreground", "--force", *files, *more)
        wait_until((directory / "socket").exists, self._tail("munged"))

    def _start(self, *argv: str, daemon: str = "", env: Mapping[str, str] = {}) -> None:
        name = daemon or argv[0]
        outer = {key: value for key, value in unmeasured().items() if not key.startswith("SLURM_")}
        with (self.directory / "log" / name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                self.namespace.as_root(argv),
                env={**outer, "SLURM_CONF": str(self.conf), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory / "log",
            )

    def _is_up(self, name: str) -> bool:
        return name in self._daemons and self._daemons[name].poll() is None

    def _all_idle(self) -> bool:
        return self._try("scontrol", "ping") and all(
            node.state == "idle" and node.responding for node in self.client.nodes()
        )

    def _slurm(self, *argv: str, cwd: str = "/") -> str:
        done = self._run(argv, cwd)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout

    def _try(self, *argv: str) -> bool:
        return self._run(argv, "/").returncode == 0

    def _run(self, argv: Sequence[str], cwd: str) -> subprocess.CompletedProcess[str]:
        env = {**unmeasured(), "SLURM_CONF": str(self.conf)}
        command = self.namespace.as_root(argv)
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)

    def _tail(self, name: str) -> Callable[[], str]:
        files = (self.directory / "log" / name, self.directory / f"{name}.log")
        return lambda: "\n".join(file.read_text(errors="replace")[-3000:] for file in files if file.is_file())

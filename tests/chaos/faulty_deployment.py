"""The deployment that gets the faults: an emulated run with every role, whose processes are the targets."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from primeslurm.base.errors import PrimeslurmError
from primeslurm.records.events import decode
from primeslurm.records.events.nodes import NodeLost
from primeslurm.records.reading import whole_lines
from primeslurm.run.bad_nodes import BadNode, BadNodeLedger
from primeslurm.run.status.run_status import ProcessStatus, RunStatus
from primeslurm.testbed.embedded_slurm.daemons import OsProcess, job_processes
from tests.support.emulation import ENDED, Deployment
from tests.support.faults import revive_controller, revive_node

GPU_NODES, CONTROL_NODES = 10, 6
"""One or two more nodes than the run needs, with spares, so that a lost node cannot prevent a restart of the job."""
HEAD = 0
"""Rank of the head's agent."""
SAVED_S = 400.0
"""Time after which a node that was DOWN is back and Slurm's controller has saved that, which it does every 300 s."""


@dataclass(frozen=True)
class Agent:
    """The agent of a node."""

    rank: int
    node: str
    pid: int


class FaultyDeployment(Deployment):
    """A deployment with its own directory of temporary files, which shows what a run leaves behind."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, GPU_NODES, CONTROL_NODES)
        self.tmp = directory / "tmp"
        self.tmp.mkdir()
        self.variables = {"TMPDIR": str(self.tmp)}
        self._down_at: dict[str, float] = {}

    def start(self, steps: int) -> None:
        """Start a run that tries to recover from every fault."""
        shutil.rmtree(self.tmp)
        self.tmp.mkdir()
        settings = (
            f"max_steps={steps}",
            "slurm.max_attempts=1000",
            "checkpoint.keep=1000",  # committed steps are checked at the end of the run
            "inference.kv_offload={type: mooncake, cpu: {bytes: 1073741824}}",
        )
        self.submit(*(word for setting in settings for word in ("--set", setting)))

    def look(self) -> RunStatus | None:
        """Return the run's status; None if it cannot be read at present."""
        try:
            return self.status()
        except (PrimeslurmError, OSError, ValueError):
            return None

    def over(self, status: RunStatus | None) -> bool:
        """Return whether the run has ended."""
        return status is not None and status.phase in ENDED

    def end(self) -> None:
        """Cancel the run if necessary, and wait until all its processes have ended."""
        if self._current is not None and not self.over(self.look()):
            self.command("cancel", self.run.path)
        self.wait_for_no_processes()

    def wait_for_no_processes(self, timeout_s: float = 60.0) -> bool:
        """Wait until no process of a job is left, and return whether that happened."""
        deadline = time.monotonic() + timeout_s
        while job_processes(self.conf):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        return True

    @property
    def conf(self) -> Path:
        """The cluster's slurm.conf."""
        return self.cluster.spec.slurm_conf

    def slurm(self, *argv: str) -> None:
        """Run one of Slurm's commands as administrator."""
        subprocess.run(argv, env={**os.environ, "SLURM_CONF": str(self.conf)}, check=True, capture_output=True)

    # targets

    def living(self, *roles: str) -> list[tuple[ProcessStatus, OsProcess]]:
        """Return the running processes of these roles, by name."""
        status = self.look()
        living = []
        for process in sorted(status.processes if status else [], key=lambda process: process.name):
            if process.role in roles and process.pid and (os_process := self._of_job(process.pid)):
                living.append((process, os_process))
        return living

    def agents(self) -> list[tuple[Agent, OsProcess]]:
        """Return the running agents, by rank."""
        try:
            reports = self.run.latest().heartbeats()
        except (PrimeslurmError, ValueError):
            return []
        running = []
        for report in sorted(reports, key=lambda report: report.rank):
            if not report.ended and (os_process := self._of_job(report.agent_pid)):
                running.append((Agent(report.rank, report.name, report.agent_pid), os_process))
        return running

    def roles_on(self, agent: Agent) -> set[str]:
        """Return the roles on an agent's node, including `head`."""
        status = self.look()
        roles = {process.role for process in (status.processes if status else []) if process.node == agent.node}
        return roles | ({"head"} if agent.rank == HEAD else set())

    def daemon(self, name: str) -> OsProcess | None:
        """Return a Slurm daemon; None if it is not running."""
        return next((daemon for daemon in self.cluster.daemons if daemon.name == name and daemon.alive), None)

    def _of_job(self, pid: int) -> OsProcess | None:
        """Return the process if it belongs to a job of this cluster, because pids are reused and shared with other
        processes.
        """
        process = OsProcess.of("job", pid)
        if process is None:
            return None
        # vllm-router overwrites its environment with its title, but its parent is an agent, which does not
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return process if self._is_of_job(pid) or self._is_of_job(parent) else None

    def _is_of_job(self, pid: int) -> bool:
        try:
            return f"SLURM_CONF={self.conf}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def lost_nodes(self) -> set[str]:
        """Return the nodes that the head of the current attempt has given up."""
        try:
            lines = whole_lines(self.run.latest().path / "events" / "head.jsonl")
        except PrimeslurmError:
            return set()
        return {event.node for line in lines if isinstance(event := decode(line), NodeLost)}

    # after faults

    def went_down(self, node: str) -> None:
        """Remember that Slurm may have set a node DOWN because of a fault."""
        self._down_at[node] = time.monotonic()

    @property
    def down_lately(self) -> frozenset[str]:
        """Return the nodes whose return the controller may not have saved yet."""
        return frozenset(node for node, at in self._down_at.items() if time.monotonic() - at < SAVED_S)

    def blamed(self) -> list[BadNode]:
        """Return the nodes that the runs avoid."""
        return BadNodeLedger(self.runs).entries(time.time())

    def repair_cluster(self) -> None:
        """Restart all daemons, and return all nodes to service."""
        if self.daemon("slurmctld") is None:
            revive_controller(self.cluster)
        for name in [daemon.name for daemon in self.cluster.daemons if not daemon.alive]:
            revive_node(self.cluster, name)
        ledger = BadNodeLedger(self.runs)
        for entry in self.blamed():
            ledger.forget(entry.node)

    def keep(self, directory: Path) -> None:
        """Copy the run and Slurm's logs for later inspection."""
        target = directory / self.run.run_id
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.run.path, target, ignore=shutil.ignore_patterns("weights", "*.group"))
        shutil.copytree(self.cluster.spec.directory / "log", target / "slurm-logs")

"""A small emulated deployment on an embedded cluster, driven through the command line, and its losses from faults."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from primeslurm.api.jobs import job_query
from primeslurm.orchestrator.pipeline.progress import CHECKPOINT_PART, PROGRESS, RunProgress
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.records.fleet import AgentReport
from primeslurm.records.reading import read_record
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.run_status import ProcessStatus, RlProgress, RunStatus, read_status
from primeslurm.testbed.embedded_slurm.cluster import Cluster, up
from primeslurm.testbed.embedded_slurm.config import ClusterSpec
from primeslurm.wire.stored import checkpoints
from tests.support.unmeasured import unmeasured
from tests.support.waiting import STALL_S, StallTimer

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests" / "emulated" / "small.yaml"
SLOW_FILES = ROOT / "tests" / "emulated" / "slow_files"
NODE_SILENT_S = 20
"""Longer than the disk of this deployment is full in most tests, and shorter than on other embedded clusters [s]."""
MAX_OFF_POLICY_STEPS = 8
DROPPED_AHEAD = 2
"""After step `step`, groups that are too old for step `step + 2` are dropped."""
ENDED = ("completed", "failed", "cancelled")


class Versions(NamedTuple):
    """Policy versions of a finished group."""

    opened: int
    """Version at its start."""
    newest: int
    """Newest version that sampled a token."""


@dataclass(frozen=True)
class Snapshot:
    """State of a run at one moment."""

    attempt: int
    step: int
    """Last trained step."""
    committed: int
    in_flight: int
    """Number of running rollouts."""
    restarted: int
    """Rollouts of this attempt that were lost or failed, and started again."""
    groups: Mapping[str, Versions]
    """Finished groups that are not in a checkpoint yet."""
    trained: frozenset[str]
    """Groups in a recorded or committed batch."""

    def missing(self, later: Snapshot) -> set[str]:
        """Return the finished groups that a later snapshot has lost, although they were not too old."""
        missing = self.groups.keys() - later.groups.keys() - later.trained - self.trained
        oldest = later.step + DROPPED_AHEAD - 1 - MAX_OFF_POLICY_STEPS
        return {name for name in missing if self.groups[name].opened >= oldest}


class Deployment:
    """An embedded cluster and the current run on it."""

    def __init__(self, directory: Path, gpu_nodes: int = 9, control_nodes: int = 5) -> None:
        self.runs = directory / "runs"
        spec = ClusterSpec(
            "emulated",
            directory / "c",
            self.runs,
            gpu_nodes,
            gpus_per_node=2,
            cpus_per_node=4,
            control_nodes=control_nodes,
        )
        self.slow_files = directory / "slow-files"
        """While this file exists, file operations of the job's processes are slow."""
        self.runs.mkdir()
        # a small separate file system, which a test can fill
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640m", "tmpfs", self.runs], check=True)
        self.variables: dict[str, str] = {}
        """Extra environment variables of commands and jobs."""
        self.cluster: Cluster = up(spec)[0]
        site = yaml.safe_load(spec.site_file.read_text())
        spec.site_file.write_text(yaml.safe_dump(site | {"node_silent_s": NODE_SILENT_S}))
        self._current: RunDirectory | None = None
        self._serial = 0

    @property
    def run(self) -> RunDirectory:
        """The run that was submitted last."""
        assert self._current is not None
        return self._current

    def down(self) -> None:
        self.cluster.down()
        subprocess.run(["umount", self.runs], check=True)

    def command(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `primeslurm ARGS`. Jobs inherit its environment."""
        argv = [sys.executable, "-m", "primeslurm", *map(str, args)]
        base = unmeasured()
        paths = [str(ROOT), str(SLOW_FILES), *filter(None, [base.get("PYTHONPATH")])]
        env = {**base, "PYTHONPATH": os.pathsep.join(paths), "EMULATED_SLOW_FILES": str(self.slow_files)}
        env |= self.variables
        return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    def submit(self, *options: str) -> RunDirectory:
        """Cancel the current run, and start a new one."""
        if self._current is not None and self.status().phase not in ENDED:
            self.command("cancel", self.run.path)
        self._serial += 1
        where = ("--site", self.cluster.spec.site_file, "--name", f"small-{self._serial}")
        done = self.command("submit", RECIPE, "--emulate", *where, *options, "--json")
        assert done.returncode == 0, done.stderr
        self._current = RunDirectory(Path(json.loads(done.stdout)["directory"]))
        return self._current

    def running(self) -> RunDirectory:
        """Return a healthy run that has trained a few steps: the current one, or a new one."""
        if self._current is None or self.status().phase in ENDED:
            self.submit()
        self.wait(lambda status: self.healthy(status) and self.snapshot().step >= 3)
        return self.run

    def status(self) -> RunStatus:
        return read_status(self.run, job_query(self.run), processes=True)

    def process(self, name: str) -> ProcessStatus:
        return next(process for process in self.status().processes if process.name == name)

    def healthy(self, status: RunStatus) -> bool:
        return status.phase == "running" and all(process.state == "HEALTHY" for process in status.processes)

    def wait(self, condition: Callable[[RunStatus], bool], stall_s: float = STALL_S) -> RunStatus:
        """Poll until the condition holds. Fail if the run ends, or makes no progress for `stall_s`."""
        timer = StallTimer(stall_s)
        while not condition(status := self.status()):
            states = {p.name: p.state for p in status.processes if p.state != "HEALTHY"}
            if status.phase in ENDED or timer.stalled((status.attempt, status.step, states)):
                raise AssertionError(f"{status.phase}: {status.reason} attempt {status.attempt} {states}")
            time.sleep(0.5)
        return status

    def snapshot(self) -> Snapshot:
        # Read groups before the progress. A group that is removed in between then counts as trained or too old.
        groups, trained = _spooled(self.run.path), _trained(self.run.path)
        status = self.status()
        progress = status.progress if isinstance(status.progress, RlProgress) else RlProgress()
        return Snapshot(
            attempt=status.attempt,
            step=int(status.metrics.get("step", 0)),
            committed=status.committed_step or 0,
            in_flight=progress.inflight,
            restarted=progress.counts.get("lost", 0) + progress.counts.get("failed", 0),
            groups=groups,
            trained=trained,
        )

    def head_agent(self) -> int:
        """Return the process id of the head's agent."""
        report = read_record(self.run.latest().agent_file(0), AgentReport)
        assert report is not None
        return report.agent_pid


def _spooled(run_dir: Path) -> dict[str, Versions]:
    groups = {}
    for path in (run_dir / "rollouts").glob("*.group"):
        try:
            group = RolloutGroup.from_bytes(path.read_bytes())
        except FileNotFoundError:
            continue  # committed meanwhile
        groups[group.id] = Versions(group.opened_version, group.newest_version)
    return groups


def _trained(run_dir: Path) -> frozenset[str]:
    files = [run_dir / PROGRESS]
    files += [checkpoints.step_dir(run_dir, step) / CHECKPOINT_PART for step in checkpoints.committed(run_dir)]
    records: list[RunProgress] = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # the trainer removes old checkpoints at any time
            records.append(msgspec.msgpack.decode(path.read_bytes(), type=RunProgress))
    return frozenset(group for record in records for groups in record.batches.values() for group in groups)

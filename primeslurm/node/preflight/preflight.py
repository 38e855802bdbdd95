"""Preflight: an agent checks its node in the background before it takes part in the run."""

from __future__ import annotations

import importlib.util
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from primeslurm.base.durable import retry_until_written
from primeslurm.base.files import FileWatcher, digest, read_json, write_json
from primeslurm.base.model_files import model_directory
from primeslurm.base.units import duration
from primeslurm.node.host.fabric import find_hcas
from primeslurm.node.host.network import NetworkError, own_address
from primeslurm.node.preflight import checks
from primeslurm.plan.model import VLLM_ROLES, Node, Plan
from primeslurm.records import resolved_recipe
from primeslurm.records.events.nodes import GpuFailed, PreflightDone
from primeslurm.records.fleet import FleetView, PreflightCheck, PreflightReference, PreflightState, SharedCheck
from primeslurm.records.journal import Journal
from primeslurm.records.monitors import MLFLOW_FIX, MLFLOW_MISSING
from primeslurm.records.reading import changed_record
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.versions import installed_packages

T = TypeVar("T")
_POLL_S = 0.05


@dataclass(frozen=True)
class PreflightTimings:
    """Timeouts of preflight [s]."""

    limit_s: float = 60.0  # for all checks of the node alone, and again for the checks against the head
    clock_wait_s: float = 10.0
    full_poll_s: float = 5.0  # period of looking at a full file system
    free_wait_s: float = 15.0  # for GPU memory and fixed ports that processes of the job before may still have


class Preflight:
    """The checks of one node. `start` them, then poll `verdict`."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        name: str,
        attempt: Attempt,
        tmp: Path,
        journal: Journal,
        timings: PreflightTimings = PreflightTimings(),
    ) -> None:
        self._plan, self._rank, self._name, self._attempt, self._tmp = plan, rank, name, attempt, tmp
        self._journal = journal
        self._timings = timings
        self._findings: list[PreflightCheck] = []
        self.address = ""  # of the node; empty until its network is checked
        self.checks_environments = True  # whether it still does; only their workers wait for this check
        self.environments_fail = ""  # why environments do not load here; the head compares nodes to find the cause
        self.file_system = ""  # fault of the run's file system that preflight waits out
        self._done = False
        self._started_at = time.monotonic()
        self._deadline = math.inf
        self._doing = "nothing"

    @property
    def verdict(self) -> tuple[PreflightState, str]:
        """State of the preflight, and why it failed."""
        failures = [check.text for check in self._findings if check.level == "failed"]
        if failures:
            return PreflightState.UNFIT, "; ".join(failures)
        if self._done:
            return PreflightState.FIT, ""
        if time.monotonic() > self._deadline:
            limit = duration(self._timings.limit_s)
            return PreflightState.UNFIT, f"preflight takes longer than {limit}; it checks {self._doing}"
        return PreflightState.CHECKING, ""

    @property
    def failed(self) -> list[str]:
        return sorted({check.name for check in self._findings if check.level == "failed"})

    def start(self) -> None:
        self._started_at = time.monotonic()
        self._deadline = self._started_at + self._timings.limit_s
        threading.Thread(target=self._run, daemon=True, name="preflight").start()

    def fail(self, check: str, text: str) -> None:
        """Add a check that has failed since the preflight ended."""
        self._findings.append(PreflightCheck(check, "failed", text))

    def check_gpus_again(self) -> None:
        """Check the GPUs again in the background, after a process that used some has died."""
        if self._plan.device == "cuda":
            threading.Thread(target=self._recheck_gpus, daemon=True, name="gpu check").start()

    def _recheck_gpus(self) -> None:
        # The memory of a dead process is freed a moment later, and says nothing about the GPU.
        findings = [check for check in checks.gpu_checks(self._gpus) if check.name != "gpu memory"]
        failures = [check for check in findings if check.level == "failed"]
        if failures:
            self._findings += failures
            self._journal.write(GpuFailed(self._name, failures))

    @property
    def _candidates(self) -> list[Node]:
        """Nodes of the Plan that this node may be assigned."""
        group = self._plan.group_of_rank(self._rank).index
        return [node for node in self._plan.nodes if node.group == group]

    @property
    def _gpus(self) -> int:
        return max((len({gpu for p in node.processes for gpu in p.gpus}) for node in self._candidates), default=0)

    def _run(self) -> None:
        steps = {
            "what the others need": self._publish_reference,
            "its network": self._network,
            "its GPUs": self._gpu,
            "its engines' sockets": self._sockets,
            "its file systems": self._files,
            "the models": self._models,
            "the monitors": self._monitors,
            "the head's files": self._reference,
            "the clock": self._clock,
        }
        environments: list[PreflightCheck] = []

        def check_environments() -> None:
            environments.extend(_guarded("the environments", self._environments))
            self.environments_fail = "; ".join(check.text for check in environments if check.level == "failed")

        environment_check = threading.Thread(target=check_environments, daemon=True)
        environment_check.start()  # imports take seconds, so they run beside the other checks
        for doing, step in steps.items():
            self._doing = doing
            self._findings += _guarded(doing, step)
        self._deadline = math.inf  # each environment has its own timeout
        self._done = True
        environment_check.join()
        self._findings += environments
        self.checks_environments = False
        seconds = round(time.monotonic() - self._started_at, 2)
        state, _ = self.verdict
        self._journal.write(PreflightDone(self._name, state, seconds, self._findings))

    def _network(self) -> list[PreflightCheck]:
        try:
            plan = self._plan
            address = own_address(self._name, plan.interface, plan.addresses, plan.allocated == 1)
        except NetworkError as error:
            return [PreflightCheck("address", "failed", str(error))]
        self.address = address
        processes = [process for node in self._candidates for process in node.processes]
        ports = {port for process in processes for port in process.ports.values()}
        fixed = {process.ports[name] for process in processes for name in process.fixed_ports}
        deadline = time.monotonic() + self._timings.free_wait_s
        while True:
            found = checks.port_check(address, sorted(ports), fixed)
            if found.level != "failed" or time.monotonic() > deadline:
                return [found]
            time.sleep(1.0)

    def _gpu(self) -> list[PreflightCheck]:
        if self._plan.device == "cpu":
            return [PreflightCheck("gpus", "ok", "skipped: this site computes on CPUs")]
        if not self._gpus:
            return [PreflightCheck("gpus", "ok", "skipped: no process of this node uses one")]
        hcas = list(dict.fromkeys([*self._plan.hcas, *checks.hca_names({**self._plan.env, **os.environ})]))
        hcas = hcas or [hca.name for hca in find_hcas()]
        used = [[gpu for process in node.processes for gpu in process.gpus] for node in self._candidates]
        shared = checks.shared_gpu_checks() if any(len(gpus) > len(set(gpus)) for gpus in used) else []
        fabric = checks.hca_checks(hcas) + checks.rdma_checks(self._uses_deepep) if hcas else []
        return self._free_gpus() + shared + fabric + checks.memory_limit_checks(hcas)

    @property
    def _uses_deepep(self) -> bool:
        processes = [process for node in self._candidates for process in node.processes]
        return any(word.startswith("deepep_") for process in processes for word in process.argv)

    def _free_gpus(self) -> list[PreflightCheck]:
        # The memory of the job before may take a while to be freed.
        deadline = time.monotonic() + self._timings.free_wait_s
        while True:
            findings = checks.gpu_checks(self._gpus)
            only_memory = {check.name for check in findings if check.level == "failed"} == {"gpu memory"}
            if not only_memory or time.monotonic() > deadline:
                return findings
            time.sleep(1.0)

    def _sockets(self) -> list[PreflightCheck]:
        roles = {process.role for node in self._candidates for process in node.processes}
        # Emulated engines have no such sockets.
        return [] if self._plan.emulated or roles.isdisjoint(VLLM_ROLES) else checks.socket_checks(self._tmp)

    def _files(self) -> list[PreflightCheck]:
        run_dir, give_up = Path(self._plan.run_dir), time.monotonic() + self._plan.stall_timeout_s
        while True:
            findings = [checks.writable_check(self._attempt.path, self._rank), *checks.space_checks(run_dir, self._tmp)]
            failures = [c.text for c in findings if isinstance(c, SharedCheck) and c.level == "failed"]
            self.file_system = "; ".join(failures)
            if not self.file_system or time.monotonic() > give_up:
                self._deadline = time.monotonic() + self._timings.limit_s
                return findings
            # A full or read-only file system is the same for all nodes, so another node would not help.
            self._deadline = math.inf
            time.sleep(self._timings.full_poll_s)

    def _models(self) -> list[PreflightCheck]:
        if self._plan.emulated:
            return [PreflightCheck("model", "ok", "skipped: an emulated run loads no model")]
        from primeslurm.node.preflight import recipe_inputs  # agents of emulated runs need not keep it in memory

        inputs = recipe_inputs.read(Path(self._plan.run_dir))
        return [] if inputs is None else [self._model(path) for path in inputs.models]

    def _model(self, path: str) -> PreflightCheck:
        directory = model_directory(path)
        if directory is None:
            return PreflightCheck("model", "failed", f"there is no model {path}", "put it on the shared file system")
        return checks.model_check(directory)

    def _monitors(self) -> list[PreflightCheck]:
        """Check that the package of a monitor is installed where its process may run."""
        # The orchestrator writes the metrics of RL, and rank 0 of the trainer those of SFT.
        writers = {"orchestrator", "trainer-rank-0"}
        if writers.isdisjoint(process.name for node in self._candidates for process in node.processes):
            return []
        recipe = read_json(Path(self._plan.run_dir) / resolved_recipe.FILE) or {}
        if not recipe.get("monitor", {}).get("mlflow") or importlib.util.find_spec("mlflow"):
            return []
        return [PreflightCheck("monitors", "failed", MLFLOW_MISSING, MLFLOW_FIX)]

    def _environments(self) -> list[PreflightCheck]:
        workers = any(p.role == "environment" for node in self._candidates for p in node.processes)
        if self._plan.emulated or not workers:
            return []
        from primeslurm.node.preflight import recipe_inputs

        inputs = recipe_inputs.read(Path(self._plan.run_dir))
        if inputs is None:
            return []
        labels, problems = inputs.load_environments(self._plan.task, self._tmp)
        fix = "`primeslurm check` says the same where the nodes' Python is"
        return [PreflightCheck("environments", "failed", text, fix) for text in problems] or [
            PreflightCheck("environments", "ok", f"loaded: {', '.join(labels)}")
        ]

    def _publish_reference(self) -> list[PreflightCheck]:
        """On the head's node, publish what the other nodes compare themselves with."""
        if self._rank == 0:
            reference = PreflightReference(digest(self._attempt.plan_file), installed_packages())
            retry_until_written(
                lambda: write_json(self._attempt.reference_file, msgspec.to_builtins(reference)),
                self._plan.stall_timeout_s,
                self._timings.full_poll_s,
                self._note_unwritable,
            )
        return []

    def _note_unwritable(self, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) else error
        self.file_system = f"cannot write to {self._attempt.path}: {why}"
        self._deadline = math.inf

    def _reference(self) -> list[PreflightCheck]:
        self._deadline = math.inf  # this node is not to blame for a late head
        file = FileWatcher(self._attempt.reference_file)
        reference = self._wait_for(file, PreflightReference, self._plan.node_start_s)
        self._deadline = time.monotonic() + self._timings.limit_s
        name = "shared file system"
        if reference is None:
            text = f"the files of the head are not visible after {duration(self._plan.node_start_s)}"
            return [PreflightCheck(name, "failed", text, "mount the run directory's file system on the node")]
        if digest(self._attempt.plan_file) != reference.plan_digest:
            return [PreflightCheck(name, "failed", f"{self._attempt.plan_file} differs from what the head sees")]
        lock = RunDirectory(Path(self._plan.run_dir)).lock()
        return checks.version_checks(installed_packages(), reference.packages, lock.packages)

    def _clock(self) -> list[PreflightCheck]:
        file = FileWatcher(self._attempt.fleet_file)
        finding = PreflightCheck("clock", "warning", "the head's time is not seen")
        for _ in range(2):  # the first view may be old, but the head writes new ones all the time
            view = self._wait_for(file, FleetView, self._timings.clock_wait_s)
            if view is not None:
                finding = checks.clock_check(time.time() - view.time)
            if finding.level == "ok":
                break
        return [finding]

    def _wait_for(self, file: FileWatcher, kind: type[T], timeout_s: float) -> T | None:
        deadline = time.monotonic() + timeout_s
        while (value := changed_record(file, kind)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return value


def _guarded(doing: str, step: Callable[[], list[PreflightCheck]]) -> list[PreflightCheck]:
    try:
        return step()
    except Exception as error:  # an unforeseen error excludes the node, and is reported as the reason
        return [PreflightCheck(doing, "failed", f"{doing}: {type(error).__name__}: {error}")]

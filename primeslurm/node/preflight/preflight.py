"""Preflight: an agent looks over its node before it takes a part in the run, in the background."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from primeslurm.base.files import FileWatcher, digest, write_json
from primeslurm.base.model_files import model_directory
from primeslurm.base.units import duration
from primeslurm.node.host.fabric import find_hcas
from primeslurm.node.host.network import NetworkError, own_address
from primeslurm.node.preflight import checks
from primeslurm.plan.model import VLLM_ROLES, Node, Plan
from primeslurm.records.events.nodes import GpuFailed, PreflightDone
from primeslurm.records.fleet import FleetView, PreflightCheck, PreflightReference, PreflightState, SharedCheck
from primeslurm.records.journal import Journal
from primeslurm.records.reading import changed_record
from primeslurm.records.reserve import until_written
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.versions import installed_packages

T = TypeVar("T")
_POLL_S = 0.05


@dataclass(frozen=True)
class PreflightTimings:
    """How long preflight waits, in seconds."""

    limit_s: float = 60.0
    """For all checks of the node by itself, and again for those that need the head."""
    clock_wait_s: float = 10.0
    full_poll_s: float = 5.0
    """Between two looks at a file system that is full."""
    gpu_free_wait_s: float = 15.0


class Preflight:
    """The checks of one node. `start` them, then ask for the `verdict` from time to time.

    Args:
        plan: the whole.
        rank: of the node's agent.
        name: of the node, in Slurm's words.
        attempt: whose directory has to be readable and writable.
        tmp: the agent's directory on the node's disk.
        journal: gets the outcome.
        timings: how long to wait.
    """

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
        self._found: list[PreflightCheck] = []
        self.environments_fail = ""
        """Why environments do not load here; whether that is this node's fault, the others tell."""
        self.file_system = ""
        """What is wrong with the file system of the run directory; waited for while the node is being checked."""
        self._done = False
        self._started_at = time.monotonic()
        self._deadline = math.inf
        self._doing = "nothing"

    @property
    def verdict(self) -> tuple[PreflightState, str]:
        """Whether the node is fit, and why not."""
        bad = [check.text for check in self._found if check.level == "failed"]
        if bad:
            return PreflightState.UNFIT, "; ".join(bad)
        if self._done:
            return PreflightState.FIT, ""
        if time.monotonic() > self._deadline:
            return (
                PreflightState.UNFIT,
                f"preflight takes longer than {duration(self._timings.limit_s)}; it checks {self._doing}",
            )
        return PreflightState.CHECKING, ""

    @property
    def failed(self) -> list[str]:
        """Names of the checks that the node failed."""
        return sorted({check.name for check in self._found if check.level == "failed"})

    def start(self) -> None:
        """Begin."""
        self._started_at = time.monotonic()
        self._deadline = self._started_at + self._timings.limit_s
        threading.Thread(target=self._run, daemon=True, name="preflight").start()

    def check_gpus_again(self) -> None:
        """Check the GPUs once more, after the death of a process that had some: were they the reason?"""
        if self._plan.device == "cuda":
            threading.Thread(target=self._look_at_gpus, daemon=True, name="gpu check").start()

    def _look_at_gpus(self) -> None:
        # What the process leaves behind is given back in a moment, and tells nothing of the GPUs.
        found = [check for check in checks.gpu_checks(self._gpus) if check.name != "gpu memory"]
        bad = [check for check in found if check.level == "failed"]
        if bad:
            self._found += bad
            self._journal.write(GpuFailed(self._name, bad))

    @property
    def _gpus(self) -> int:
        """GPUs that the widest part of this node's group uses."""
        return max((len({gpu for p in node.processes for gpu in p.gpus}) for node in self._parts), default=0)

    @property
    def _shares_gpus(self) -> bool:
        """Whether two processes of a part of this node's group use the same GPU."""
        used = [[gpu for process in node.processes for gpu in process.gpus] for node in self._parts]
        return any(len(gpus) > len(set(gpus)) for gpus in used)

    @property
    def _parts(self) -> list[Node]:
        """Nodes of the Plan that this one may be given to play: those of its group."""
        group = self._plan.group_of_rank(self._rank).index
        return [node for node in self._plan.nodes if node.group == group]

    def _run(self) -> None:
        parts = {
            "what the others need": self._tell_reference,
            "its network": self._network,
            "its GPUs": self._gpu,
            "its engines' sockets": self._sockets,
            "its file systems": self._files,
            "the models": self._models,
            "the head's files": self._reference,
            "the clock": self._clock,
        }
        environments: list[PreflightCheck] = []
        beside = threading.Thread(
            target=lambda: environments.extend(_looked("the environments", self._environments)), daemon=True
        )
        beside.start()  # importing takes seconds
        for doing, part in parts.items():
            self._doing = doing
            self._found += _looked(doing, part)
        self._deadline = math.inf  # they have a time limit each
        beside.join()
        self._found += environments
        self._done = True
        seconds = round(time.monotonic() - self._started_at, 2)
        fitness, _ = self.verdict
        self._journal.write(PreflightDone(self._name, fitness, seconds, self._found))

    def _network(self) -> list[PreflightCheck]:
        try:
            plan = self._plan
            address = own_address(self._name, plan.interface, plan.addresses, plan.allocated == 1)
        except NetworkError as error:
            return [PreflightCheck("address", "failed", str(error))]
        ports = {port for node in self._parts for process in node.processes for port in process.ports.values()}
        return [checks.port_check(address, sorted(ports))]

    def _gpu(self) -> list[PreflightCheck]:
        if self._plan.device == "cpu":
            return [PreflightCheck("gpus", "ok", "skipped: this site computes on CPUs")]
        if not self._gpus:
            return [PreflightCheck("gpus", "ok", "skipped: no process of this node uses one")]
        hcas = list(dict.fromkeys([*self._plan.hcas, *checks.hca_names({**self._plan.env, **os.environ})]))
        hcas = hcas or [hca.name for hca in find_hcas()]
        shared = checks.shared_gpu_checks() if self._shares_gpus else []
        return self._free_gpus() + shared + (checks.hca_checks(hcas) if hcas else []) + checks.memory_limit_checks(hcas)

    def _free_gpus(self) -> list[PreflightCheck]:
        """The GPUs' checks; what a job before this one left in their memory may take a while to go."""
        deadline = time.monotonic() + self._timings.gpu_free_wait_s
        while True:
            found = checks.gpu_checks(self._gpus)
            only_memory = {check.name for check in found if check.level == "failed"} == {"gpu memory"}
            if not only_memory or time.monotonic() > deadline:
                return found
            time.sleep(1.0)

    def _sockets(self) -> list[PreflightCheck]:
        """Stand-ins of an emulated run have no sockets of their own."""
        roles = {process.role for node in self._parts for process in node.processes}
        return [] if self._plan.emulated or roles.isdisjoint(VLLM_ROLES) else checks.socket_checks(self._tmp)

    def _files(self) -> list[PreflightCheck]:
        """A full or read-only file system is waited for, as any progress is: another node would see it alike."""
        run_dir, give_up = Path(self._plan.run_dir), time.monotonic() + self._plan.stall_timeout_s
        while True:
            found = [checks.writable_check(self._attempt.path, self._rank), *checks.space_checks(run_dir, self._tmp)]
            self.file_system = "; ".join(c.text for c in found if isinstance(c, SharedCheck) and c.level == "failed")
            if not self.file_system or time.monotonic() > give_up:
                self._deadline = time.monotonic() + self._timings.limit_s
                return found
            self._deadline = math.inf
            time.sleep(self._timings.full_poll_s)

    def _models(self) -> list[PreflightCheck]:
        if self._plan.emulated:
            return [PreflightCheck("model", "ok", "skipped: stand-ins load none")]
        from primeslurm.node.preflight import loaded  # recipes, which agents of stand-ins need not keep in memory

        recipe = loaded.read(Path(self._plan.run_dir))
        return [] if recipe is None else [self._model(path) for path in recipe.models]

    def _model(self, path: str) -> PreflightCheck:
        directory = model_directory(path)
        if directory is None:
            return PreflightCheck("model", "failed", f"there is no model {path}", "put it on the shared file system")
        return checks.model_check(directory)

    def _environments(self) -> list[PreflightCheck]:
        """Whether the environments load whose workers may run here."""
        workers = any(p.role == "environment" for node in self._parts for p in node.processes)
        if self._plan.emulated or not workers:
            return []
        from primeslurm.node.preflight import loaded

        recipe = loaded.read(Path(self._plan.run_dir))
        if recipe is None:
            return []
        named, problems = recipe.tried(self._plan.task, self._tmp)
        self.environments_fail = "; ".join(problems)
        fix = "`primeslurm check` says the same where the nodes' Python is"
        return [PreflightCheck("environments", "failed", text, fix) for text in problems] or [
            PreflightCheck("environments", "ok", f"loaded: {', '.join(named)}")
        ]

    def _tell_reference(self) -> list[PreflightCheck]:
        """The head tells the others what to compare with."""
        if self._rank == 0:
            reference = PreflightReference(digest(self._attempt.plan_file), installed_packages())
            until_written(
                lambda: write_json(self._attempt.reference_file, msgspec.to_builtins(reference)),
                self._plan.stall_timeout_s,
                self._timings.full_poll_s,
                self._refused,
            )
        return []

    def _refused(self, error: Exception) -> None:
        """The file system does not take a record: the others hear of it, and no time runs out here meanwhile."""
        why = error.strerror if isinstance(error, OSError) else error
        self.file_system = f"cannot write to {self._attempt.path}: {why}"
        self._deadline = math.inf

    def _reference(self) -> list[PreflightCheck]:
        self._deadline = math.inf  # a head that starts late is no fault of this node
        file = FileWatcher(self._attempt.reference_file)
        reference = self._wait_for(file, PreflightReference, self._plan.node_start_s)
        self._deadline = time.monotonic() + self._timings.limit_s
        if reference is None:
            text = f"the files of the head are not visible after {duration(self._plan.node_start_s)}"
            return [
                PreflightCheck(
                    "shared file system", "failed", text, "mount the run directory's file system on the node"
                )
            ]
        if digest(self._attempt.plan_file) != reference.plan_digest:
            return [
                PreflightCheck(
                    "shared file system", "failed", f"{self._attempt.plan_file} differs from what the head sees"
                )
            ]
        lock = RunDirectory(Path(self._plan.run_dir)).lock()
        return checks.version_checks(installed_packages(), reference.packages, lock.packages)

    def _clock(self) -> list[PreflightCheck]:
        """The head writes its time into fleet.json all the time."""
        file = FileWatcher(self._attempt.fleet_file)
        found = PreflightCheck("clock", "warning", "the head's time is not seen")
        for _ in range(2):  # the first one may have been there for long
            view = self._wait_for(file, FleetView, self._timings.clock_wait_s)
            if view is not None:
                found = checks.clock_check(time.time() - view.time)
            if found.level == "ok":
                break
        return [found]

    def _wait_for(self, file: FileWatcher, kind: type[T], timeout_s: float) -> T | None:
        """Return a record once the file has one that is whole; None after so many seconds."""
        deadline = time.monotonic() + timeout_s
        while (value := changed_record(file, kind)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return value


def _looked(doing: str, part: Callable[[], list[PreflightCheck]]) -> list[PreflightCheck]:
    try:
        return part()
    except Exception as error:  # an unforeseen one is a reason to leave the node out, with that reason
        return [PreflightCheck(doing, "failed", f"{doing}: {type(error).__name__}: {error}")]

"""The agent of one node: starts, watches, restarts and ends the processes that the Plan gives this node.

It survives what it runs, and speaks to the other agents through small files in the attempt directory: its heartbeat
`nodes/<i>.json`, and from the head `addresses.json` (who listens where) and `fleet.json` (what is ready, and the end).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from primeslurm.node.child import Child
from primeslurm.node.fleet import Ending, NodeReport, Outcome, ProcessReport
from primeslurm.node.health import Probe, Target
from primeslurm.node.network import free_port, node_name, own_address
from primeslurm.node.resolve import Addresses, resolve
from primeslurm.node.supervisor import ProcessState, Supervision
from primeslurm.plan.model import Node, Plan
from primeslurm.run.directory import Attempt
from primeslurm.wire.files import read_json, write_json
from primeslurm.wire.journal import Journal
from primeslurm.wire.secret import generate_token, read

TICK_S = 0.25
HEARTBEAT_S = 1.0
HEAD_SILENT_S = 180.0
"""A head that has published nothing for this long is gone: its node stops what it runs."""
TERM_GRACE_S = 15.0
"""From SIGTERM to SIGKILL. Slurm's own KillWait is 30 s."""


class FleetView(msgspec.Struct, frozen=True):
    """`fleet.json`: what the head tells every agent."""

    time: float
    ready: list[str] = []
    states: dict[str, str] = {}
    ending: Ending | None = None
    release: bool = False
    """Set while ending: trainers are done (or out of time), everything else may stop."""


class NodeAgent:
    """Runs one node's share of a Plan. `run` blocks until the attempt has ended on this node."""

    def __init__(self, plan: Plan, node: Node, attempt: Attempt, run_id: str, python: str) -> None:
        self.plan, self.node, self.attempt = plan, node, attempt
        self.name = node_name()
        self.address = own_address(self.name, plan.interface, plan.addresses)
        self.tmp = Path(tempfile.gettempdir()) / f"primeslurm-{run_id}-{attempt.number}-n{node.index}"
        self.journal = Journal(attempt.path, f"agent-{node.index}")
        self.supervised = {process.name: Supervision(process) for process in node.processes}
        self.children: dict[str, Child] = {}
        self.probes: dict[str, Probe] = {}
        self.ports: dict[str, dict[str, int]] = {}
        self.addresses: Addresses | None = None
        self.view = FleetView(time=0.0)
        self.error = ""
        self._secrets = _secrets(plan)
        self._values = {
            "run_dir": plan.run_dir,
            "attempt": str(attempt.number),
            "attempt_dir": str(attempt.path),
            "run_id": run_id,
            "python": python,
            "tmp": str(self.tmp),
        }
        self._local_ending: Ending | None = None
        self._last_heartbeat = 0.0
        self._head_seen_at = time.time()
        self._ending_since: float | None = None
        self._asked_to_checkpoint = False
        self._termed_at: float | None = None

    def end(self, ending: Ending) -> None:
        """Ask this node to stop what it runs, from any thread or signal handler."""
        self._local_ending = self._local_ending or ending

    @property
    def ending(self) -> Ending | None:
        """Why the attempt ends, if it does."""
        return self._local_ending or self.view.ending

    def run(self) -> None:
        """Start what there is to start and keep it running until the attempt ends."""
        try:
            self.tmp.mkdir(parents=True, exist_ok=True)
            self._claim_ports()
            self.journal.event("agent_started", node=self.name, address=self.address)
            while not self._finished():
                self.tick(time.time())
                time.sleep(TICK_S)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self.journal.event("agent_failed", error=self.error)
            raise
        finally:
            self._kill_all()
            shutil.rmtree(self.tmp, ignore_errors=True)
            self._heartbeat(time.time(), ended=True)

    def tick(self, now: float) -> None:
        """One turn: reap, look at what the head says, act, report."""
        self._reap(now)
        self._read_head(now)
        if self.ending is not None:
            self._wind_down(now, self.ending)
        elif self.addresses is not None:
            for supervision in self.supervised.values():
                self._advance(supervision, now)
        if now - self._last_heartbeat >= HEARTBEAT_S:
            self._heartbeat(now, ended=False)

    def _claim_ports(self) -> None:
        taken: set[int] = set()
        for process in self.node.processes:
            self.ports[process.name] = {}
            for name, preferred in process.ports.items():
                port = free_port(self.address, preferred, taken)
                taken.add(port)
                self.ports[process.name][name] = port

    def _read_head(self, now: float) -> None:
        if self.addresses is None and (found := read_json(self.attempt.addresses_file)):
            self.addresses = Addresses(hosts=found["hosts"], ports=found["ports"])
        value = read_json(self.attempt.fleet_file)
        if value is not None and value["time"] != self.view.time:
            self.view = msgspec.convert(value, FleetView)
            self._head_seen_at = now
        elif now - self._head_seen_at > HEAD_SILENT_S:
            self.end(Ending(Outcome.FAILED, f"the head has been silent for {HEAD_SILENT_S:.0f} s", "head"))

    def _advance(self, supervision: Supervision, now: float) -> None:
        process = supervision.process
        probe = self.probes.get(process.name)
        decision = supervision.tick(
            now,
            prerequisites=all(name in self.view.ready for name in process.after),
            ready=supervision.running and (probe is None or probe.ready),
        )
        if decision == "start":
            self._start(supervision, now)
        elif decision == "kill":
            self.children[process.name].kill()

    def _start(self, supervision: Supervision, now: float) -> None:
        process = supervision.process
        addresses = self.addresses
        assert addresses is not None

        def fill(text: str, more: Mapping[str, str] = {}) -> str:
            return resolve(text, process.name, addresses, {**self._values, **more})

        # Secrets are for environments alone: everybody can read command lines.
        given = {key: fill(value, self._secrets) for key, value in {**self.plan.env, **process.env}.items()}
        env = dict(os.environ) | given
        if process.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible(gpu) for gpu in process.gpus)
        argv = [fill(word) for word in process.argv]
        try:
            child = Child(argv, env, self.attempt.path / process.log, Path(self.plan.run_dir))
        except OSError as error:
            supervision.reason = str(error)
            supervision.started(now)
            supervision.exited(now, 127, ending=False)
            self.journal.event("start_failed", name=process.name, error=str(error))
            return
        self.children[process.name] = child
        supervision.started(now)
        if process.health is not None:
            port = self.ports[process.name][process.health.port]
            self.probes[process.name] = Probe(Target(self.address, port, process.health.path))
        self.journal.event("started", name=process.name, pid=child.pid, restarts=supervision.restarts)

    def _visible(self, gpu: int) -> str:
        """The node's `gpu`-th GPU as CUDA numbers it in this allocation."""
        allocated = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        return allocated[gpu] if gpu < len(allocated) else str(gpu)

    def _reap(self, now: float) -> None:
        for name, child in list(self.children.items()):
            code = child.poll()
            if code is None:
                continue
            del self.children[name]
            if probe := self.probes.pop(name, None):
                probe.stop()
            supervision = self.supervised[name]
            supervision.exited(now, code, ending=self.ending is not None)
            self.journal.event("exited", name=name, code=code, state=supervision.state)

    def _wind_down(self, now: float, ending: Ending) -> None:
        """Trainers first, with a checkpoint if that is still possible; then everything else."""
        if self._ending_since is None:
            self._ending_since = now
            self.journal.event("ending", outcome=ending.outcome, reason=ending.reason)
        hurry = self._local_ending is not None or ending.outcome in (Outcome.COMPLETED, Outcome.CANCELLED)
        trainers = [n for n in self.children if self.supervised[n].process.role == "trainer"]
        if trainers and not hurry and not self.view.release:
            if not self._asked_to_checkpoint:
                self._asked_to_checkpoint = True
                for name in trainers:
                    self.children[name].send(signal.SIGUSR1)
            return
        if not hurry and not self.view.release:
            return
        if self._termed_at is None:
            self._termed_at = now
            for child in self.children.values():
                child.terminate()
        elif now - self._termed_at > TERM_GRACE_S:
            self._kill_all()

    def _finished(self) -> bool:
        return self._termed_at is not None and not self.children

    def _kill_all(self) -> None:
        for child in self.children.values():
            child.kill()

    def _heartbeat(self, now: float, *, ended: bool) -> None:
        self._last_heartbeat = now
        report = NodeReport(
            index=self.node.index,
            name=self.name,
            address=self.address,
            time=now,
            agent_pid=os.getpid(),
            ports=self.ports,
            processes={name: self._process_report(s) for name, s in self.supervised.items()},
            ended=ended,
            error=self.error,
        )
        try:
            write_json(self.attempt.node_file(self.node.index), msgspec.to_builtins(report))
        except OSError as error:
            self.journal.event("heartbeat_failed", error=str(error))

    def _process_report(self, supervision: Supervision) -> ProcessReport:
        name = supervision.process.name
        child, probe = self.children.get(name), self.probes.get(name)
        healthy = probe.healthy if probe is not None else supervision.state is ProcessState.READY
        return ProcessReport(
            state=supervision.state,
            pid=child.pid if child else None,
            exit_code=supervision.exit_code,
            restarts=supervision.restarts,
            since=supervision.since,
            healthy=healthy,
            reason=supervision.reason,
        )


def _secrets(plan: Plan) -> dict[str, str]:
    """What `${secret}` and `${generate_token}` mean, if the plan uses them. Raises SecretError."""
    if not any("${secret}" in value for value in plan.env.values()):
        return {}
    own = read(Path(plan.run_dir))
    return {"secret": own, "generate_token": generate_token(own)}

"""The processes of one node of the Plan, run on this machine: started, watched, restarted, ended."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from primeslurm.base import files as storage
from primeslurm.node.agent.child_process import Child, ProcessGroup
from primeslurm.node.agent.fork_client import ForkServers
from primeslurm.node.agent.health_probe import TIMEOUT_S, HealthProbe, ProbeTarget
from primeslurm.node.agent.liveness_monitor import STOPPED_S, Liveness, LivenessMonitor
from primeslurm.node.agent.node_context import NodeContext, resolve
from primeslurm.node.agent.supervision import ProcessState, Supervision
from primeslurm.node.host.network import Ports
from primeslurm.node.host.shared_memory import SharedMemory
from primeslurm.plan.model import Node, Plan, Process
from primeslurm.records import heartbeats
from primeslurm.records.events.nodes import PortTaken
from primeslurm.records.events.processes import (
    ProcessContinued,
    ProcessExited,
    ProcessStarted,
    ProcessStartFailed,
    ProcessUnresponsive,
)
from primeslurm.records.fleet import FleetView, HeartbeatReport, ProcessReport
from primeslurm.records.journal import Journal
from primeslurm.run.diagnosis.logs import last_words
from primeslurm.run.directory import Attempt
from primeslurm.wire import exit_codes
from primeslurm.wire.transport.addresses import Addresses
from primeslurm.wire.transport.secret import HANDED_OVER, VARIABLE, generate_token, handing_over, read

LOOK_S = 30.0
"""Between two looks at the shared memory of what runs."""
DUMP_S = 2.0
"""What hangs has so long to write where it is, before it is killed."""
UNLINK_S = 5.0
"""What is killed at the end is gone after so long, GPU drivers' work included."""

_FOR_CHECKPOINTS = ("trainer", "orchestrator")
"""Roles that write a last checkpoint. They handle no SIGTERM: the agent tells the trainer to checkpoint by SIGUSR1."""

Command = tuple[tuple[str, ...], dict[str, str], dict[str, str], frozenset[str]]
"""What a process is started with: argv, environment, files, and which of the processes that it needs were given up."""


class ProcessManager:
    """Starts, watches, restarts and ends one node's share of a Plan.

    Args:
        plan: the whole.
        node: this node's part of it.
        attempt: where logs go.
        address: the node's own.
        values: placeholders that are no addresses (`plan.model`).
        journal: gets an event for every start and exit.
        probe_timeout_s: for the answer of a server that is probed.
        stopped_s: after which a process that a signal has stopped is continued.

    Raises:
        NetworkError: a port that a process needs cannot be had.
        OSError: a directory that a process wants on the node's disk cannot be made.
        SecretError: the plan needs the run's secret, and there is none.
    """

    def __init__(
        self,
        plan: Plan,
        node: Node,
        attempt: Attempt,
        address: str,
        values: Mapping[str, str],
        journal: Journal,
        *,
        probe_timeout_s: float = TIMEOUT_S,
        stopped_s: float = STOPPED_S,
    ) -> None:
        self.plan, self.node, self.attempt, self.address = plan, node, attempt, address
        self.supervised = {process.name: Supervision(process) for process in node.processes}
        self.children: dict[str, ProcessGroup] = {}
        self.probes: dict[str, HealthProbe] = {}
        self.liveness_monitor = LivenessMonitor()
        self._killed_at: dict[str, float] = {}
        """When those that hang are killed."""
        self._claims = Ports(address)
        self.ports = {
            process.name: {name: self._claims.claim(preferred) for name, preferred in process.ports.items()}
            for process in node.processes
        }
        self._context = NodeContext(plan, node, address, values)
        self._context.make_scratch()
        self._forks = ForkServers(attempt.path / "logs" / f"imports-n{node.index}", Path(plan.run_dir))
        self._secrets = _secrets(plan)
        self._journal = journal
        self._probe_timeout_s = probe_timeout_s
        self._stopped_s = stopped_s
        self._started_with: dict[str, Command] = {}
        self._shared_memory = SharedMemory()
        self._looked_at = 0.0

    @property
    def scratch(self) -> list[Path]:
        """Directories on the node's disk that go when this ends."""
        return self._context.scratch

    def take_over(self, processes: Iterable[Process]) -> None:
        """Run processes of another node of the Plan as well, from now on. Those that are here already stay as they are.

        Raises:
            NetworkError: a port that a process needs cannot be had.
        """
        for process in processes:
            if process.name not in self.supervised:
                self.supervised[process.name] = Supervision(process)
                self.ports[process.name] = {
                    name: self._claims.claim(preferred) for name, preferred in process.ports.items()
                }

    def is_known(self, addresses: Addresses) -> bool:
        """Whether its own addresses are published, and not still those of a node that this one replaces."""
        return all(
            addresses.hosts.get(name) == self.address and addresses.ports.get(name) == ports
            for name, ports in self.ports.items()
        )

    def reap(self, now: float, *, ending: bool) -> list[Process]:
        """Take note of what has ended.

        Args:
            now: the clock, in seconds.
            ending: the attempt ends, so that nothing is started again.

        Returns:
            The processes that have ended since the last call.
        """
        codes = {name: code for name, child in self.children.items() if (code := child.poll()) is not None}
        self._clear(codes)
        ended = []
        for name, code in codes.items():
            del self.children[name]
            if probe := self.probes.pop(name, None):
                probe.stop()
            served = self.liveness_monitor.ended(name) > 0
            self._killed_at.pop(name, None)
            supervision = self.supervised[name]
            if (
                code in (exit_codes.FAILED, exit_codes.USAGE_ERROR, exit_codes.UNRECOVERABLE)
                and not ending
                and not supervision.reason
            ):
                supervision.reason = last_words(self.attempt.path / supervision.process.log)
            supervision.exited(now, code, ending=ending, served=served)
            self._journal.write(ProcessExited(name, code, supervision.state, supervision.reason or None))
            ended.append(supervision.process)
        self._shared_memory.unlink()
        return ended

    def tick(self, now: float, view: FleetView, addresses: Addresses) -> None:
        """Start and end what the head's view and the time ask for.

        Args:
            now: the clock, in seconds.
            view: what the head said last.
            addresses: who listens where; a process is started with what they say of it and of those that it talks to.
        """
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look(self.children)
        self.liveness_monitor.look(now)
        self._continue_stopped()
        ready, lost = set(view.ready), set(view.lost)
        for supervision in self.supervised.values():
            process = supervision.process
            if process.name in lost:
                self._kill(process.name)
                continue
            probe = self.probes.get(process.name)
            order = view.units.get(process.unit) if process.unit else None
            decision = supervision.tick(
                now,
                prerequisites=all(name in ready or name in lost for name in process.after),
                ready=supervision.running and (probe is None or probe.ready),
                hangs=self._hangs(process, view),
                silent_s=self.liveness_monitor.of(process.name).silent_s,
                order=order,
            )
            if decision == "start" and not self._moved(process) and not self._importing(process, addresses):
                self._start(supervision, now, addresses, order.generation if order else 0)
            elif decision == "end_hung":
                self._end_hung(process.name, now)
            elif decision == "kill" or now >= self._killed_at.get(process.name, math.inf):
                self._kill(process.name)

    def _hangs(self, process: Process, view: FleetView) -> str:
        """Why a process is taken to hang; empty if it is not.

        Ranks wait for one another, so that all of them are silent when one hangs: which of them it is, the head says.
        """
        liveness = self.liveness_monitor.of(process.name)
        if process.role == "trainer":  # one that has gone on meanwhile, or was started anew, is not meant
            return view.hung.get(process.name, "") if liveness.silent_s > self._stopped_s else ""
        return f"hangs: {liveness.report().words}" if liveness.hangs else ""

    def _continue_stopped(self) -> None:
        for name, child in self.children.items():
            liveness = self.liveness_monitor.of(name)
            if liveness.stopped and liveness.silent_s > self._stopped_s and name not in self._killed_at:
                child.go_on()
                self._journal.write(ProcessContinued(name, round(liveness.silent_s, 1)))

    def _end_hung(self, name: str, now: float) -> None:
        child, liveness = self.children[name], self.liveness_monitor.of(name)
        heartbeat = liveness.heartbeat
        event = ProcessUnresponsive(
            name, round(liveness.silent_s, 1), heartbeat.phase, heartbeat.step, self.supervised[name].reason
        )
        self._journal.write(event)
        if heartbeat.number and self.supervised[name].process.heartbeats is not None:
            child.send(heartbeats.DUMP_SIGNAL)
        child.send(signal.SIGCONT)  # one that is stopped takes no other signal
        self._killed_at[name] = now + DUMP_S

    def renew(self, addresses: Addresses) -> None:
        """End those that were started with what is no longer so: addresses that changed, neighbours that are lost."""
        for name in list(self.children):
            supervision = self.supervised[name]
            if self._command(supervision.process, addresses) == self._started_with[name]:
                continue
            if supervision.renew("processes that it talks to have moved or are gone") == "kill":
                self._kill(name)

    def send(self, role: str, number: signal.Signals) -> None:
        """Send a signal to every process of a role."""
        for name, child in self.children.items():
            if self.supervised[name].process.role == role:
                child.send(number)

    def terminate(self) -> None:
        """Send SIGTERM to everything."""
        self._look(self.children)
        for child in self.children.values():
            child.terminate()

    def kill(self) -> None:
        """Send SIGKILL to everything."""
        self._look(self.children)
        for child in self.children.values():
            child.kill()

    def close(self) -> None:
        """Send SIGKILL to everything that is left, and remove what was made for it."""
        self._clear(self.children)
        for name in self.children:
            self.liveness_monitor.ended(name)
        self._forks.close()
        self._shared_memory.unlink_within(UNLINK_S)
        self._context.remove_scratch()
        self._claims.release()

    def reports(self) -> dict[str, ProcessReport]:
        """Return the state of every process, by name, for the heartbeat."""
        return {name: self._report(supervision) for name, supervision in self.supervised.items()}

    @property
    def states(self) -> dict[str, tuple[object, ...]]:
        """What of the reports is new whenever it changes, by name; how long a process has been silent is not."""
        return {
            name: (supervision.state, supervision.restarts, supervision.generation, self._is_healthy(supervision))
            for name, supervision in self.supervised.items()
        }

    def _is_healthy(self, supervision: Supervision) -> bool:
        probe = self.probes.get(supervision.process.name)
        return probe.healthy if probe is not None else supervision.state is ProcessState.READY

    def _report(self, supervision: Supervision) -> ProcessReport:
        name = supervision.process.name
        child = self.children.get(name)
        return ProcessReport(
            state=supervision.state,
            pid=child.pid if child else None,
            exit_code=supervision.exit_code,
            restarts=supervision.restarts,
            since=time.time() - (time.monotonic() - supervision.since),
            healthy=self._is_healthy(supervision),
            reason=supervision.reason,
            generation=supervision.generation,
            failed_starts=supervision.failed_starts,
            start_error=supervision.start_error,
            heartbeat=self._beat(name),
        )

    def _beat(self, name: str) -> HeartbeatReport | None:
        liveness = self.liveness_monitor.of(name)
        return liveness.report() if name in self.children and liveness != Liveness() else None

    def _kill(self, name: str) -> None:
        if child := self.children.get(name):
            self._look([name])
            child.kill()

    def _clear(self, names: Collection[str]) -> None:
        """Kill what is left of groups of processes; what they had in shared memory is nobody's then."""
        self._look(names)
        for name in names:
            self.children[name].kill()
            self._shared_memory.ended(self.children[name].pid)

    def _look(self, names: Collection[str]) -> None:
        self._shared_memory.look([self.children[name].pid for name in names])

    def _start(self, supervision: Supervision, now: float, addresses: Addresses, generation: int) -> None:
        process = supervision.process
        command = self._command(process, addresses)
        argv, env, files, _ = command
        supervision.started(now, generation)
        page = heartbeats.HeartbeatPage(process.name) if process.heartbeats is not None else None
        env = dict(os.environ) | env | ({heartbeats.VARIABLE: str(page.descriptor)} if page else {})
        try:
            self._context.write(files)
            child = self._spawn(process, argv, env, page)
        except OSError as error:
            if page:
                page.close()
            if storage.is_transient(error):  # it is the log's file system that is away for a moment
                supervision.postponed(now)
                return
            supervision.reason = str(error)
            supervision.exited(now, exit_codes.COMMAND_NOT_FOUND, ending=False)
            self._journal.write(ProcessStartFailed(process.name, str(error)))
            return
        self.children[process.name] = child
        self._started_with[process.name] = command
        if process.health is not None:
            port = self.ports[process.name][process.health.port]
            target = ProbeTarget(self.address, port, process.health.path)
            self.probes[process.name] = HealthProbe(target, self._probe_timeout_s)
        self.liveness_monitor.started(process, child.pid, page, self.probes.get(process.name))
        self._journal.write(ProcessStarted(process.name, child.pid, supervision.restarts, generation))

    def _moved(self, process: Process) -> bool:
        """Take other ports where another user listens: they are published, and the process is started thereafter."""
        ports = self.ports[process.name]
        lost = [name for name, port in ports.items() if self._claims.is_lost(port)]
        for name in lost:
            instead = self._claims.claim(ports[name] + 1)
            self._journal.write(PortTaken(process.name, ports[name], instead))
            ports[name] = instead
        return bool(lost)

    def _importing(self, process: Process, addresses: Addresses) -> bool:
        """Whether what it imports is being imported by a process that it is to be forked from."""
        if not self._shares_imports(process):
            return False
        argv, env, _, _ = self._command(process, addresses)
        public = {name: value for name, value in (dict(os.environ) | env).items() if name != VARIABLE}
        return self._forks.importing(process.imports, argv[0], public)

    def _shares_imports(self, process: Process) -> bool:
        alike = [each for each in self.supervised.values() if each.process.imports == process.imports]
        return bool(process.imports) and len(alike) > 1

    def _spawn(
        self, process: Process, argv: tuple[str, ...], env: dict[str, str], page: heartbeats.HeartbeatPage | None
    ) -> ProcessGroup:
        handed = {heartbeats.VARIABLE: page.descriptor} if page else {}
        if VARIABLE not in self.plan.env:
            return self._started(process, argv, env, handed)
        own = env.pop(VARIABLE)
        with handing_over(own) as (descriptor, told):
            return self._started(process, argv, env | told, {**handed, HANDED_OVER: descriptor})

    def _started(
        self, process: Process, argv: tuple[str, ...], env: dict[str, str], handed: dict[str, int]
    ) -> ProcessGroup:
        log, cwd = self.attempt.path / process.log, Path(self.plan.run_dir)
        server = self._forks.of(process.imports) if self._shares_imports(process) else None
        if server is not None:
            return server.fork(argv, env, log, cwd, handed)
        ignore_term = process.role in _FOR_CHECKPOINTS
        return Child(argv, env, log, cwd, tuple(handed.values()), ignore_term=ignore_term)

    def _command(self, process: Process, addresses: Addresses) -> Command:
        fill = self._fill(process, addresses)
        private = self._fill(process, addresses, self._secrets)  # for environments: everybody can read command lines
        filled = {key: private(value) for key, value in {**self.plan.env, **process.env}.items()}
        env = {key: value for key, value in filled.items() if value}
        if process.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(gpu) for gpu in process.gpus)
        files = {name: fill(text) for name, text in process.files.items()}
        # A trainer that shares GPUs with engines waits for them at the start only. It goes on if one is given up.
        needed = frozenset[str]() if process.role == "trainer" else frozenset(process.after)
        return tuple(map(fill, process.argv)), env, files, frozenset(addresses.lost) & needed

    def _fill(self, process: Process, addresses: Addresses, more: Mapping[str, str] = {}) -> Callable[[str], str]:
        values = {**self._context.values(process), **more}
        return lambda text: resolve(text, process.name, addresses, values)


def _secrets(plan: Plan) -> dict[str, str]:
    """What `${secret}` and `${generate_token}` mean, if the plan uses them."""
    if not any("${secret}" in value for value in plan.env.values()):
        return {}
    own = read(Path(plan.run_dir))
    return {"secret": own, "generate_token": generate_token(own)}


def _visible(gpu: int) -> str:
    """The node's `gpu`-th GPU as CUDA numbers it in this allocation."""
    allocated = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    return allocated[gpu] if gpu < len(allocated) else str(gpu)

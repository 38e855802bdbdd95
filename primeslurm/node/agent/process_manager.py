"""Runs the processes of one node of the Plan on this machine: starts, watches, restarts and ends them."""

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
from primeslurm.node.agent.supervision import TASK_ROLE, ProcessState, Supervision
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
from primeslurm.records.fleet import FleetView, ProcessReport
from primeslurm.records.journal import Journal
from primeslurm.run.diagnosis.logs import last_error
from primeslurm.run.directory import Attempt
from primeslurm.wire import exit_codes
from primeslurm.wire.transport.addresses import Addresses
from primeslurm.wire.transport.secret import HANDED_OVER, VARIABLE, generate_token, handing_over, read

MEMORY_SCAN_S = 30.0  # time between two scans of the shared memory of running processes
DUMP_S = 2.0  # time for an unresponsive process to write its stacks before it is killed
UNLINK_S = 5.0  # longest wait at the end for killed processes to release their memory. GPU drivers take a while.

# These roles write the last checkpoint, and install no SIGTERM handler: SIGUSR1 asks the trainer for the checkpoint.
_CHECKPOINT_ROLES = ("trainer", "orchestrator")

# Start parameters of a process: argv, environment, files, and which of its prerequisites were given up.
Command = tuple[tuple[str, ...], dict[str, str], dict[str, str], frozenset[str]]


class ProcessManager:
    """Processes of one node of the Plan. `tick` compares them with the head's view, and acts on the difference.

    Raises:
        NetworkError: no port is free.
        OSError: a scratch directory cannot be made.
        SecretError: the Plan needs the run's secret, and there is none.
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
        self.supervised: dict[str, Supervision] = {}
        self.children: dict[str, ProcessGroup] = {}
        self.probes: dict[str, HealthProbe] = {}
        self.liveness_monitor = LivenessMonitor()
        self._kill_at: dict[str, float] = {}  # unresponsive processes that are writing their stacks
        fixed = {process.ports[name] for process in plan.processes() for name in process.fixed_ports}
        self._claims = Ports(address, fixed)
        self.ports: dict[str, dict[str, int]] = {}
        self.take_over(node.processes)
        self._context = NodeContext(plan, node, address, values)
        self._context.make_scratch()
        self._fork_servers = ForkServers(attempt.path / "logs" / f"imports-n{node.index}", Path(plan.run_dir))
        self._secrets = _secrets(plan)
        self._journal = journal
        self._probe_timeout_s = probe_timeout_s
        self._stopped_s = stopped_s
        self._started_with: dict[str, Command] = {}
        self._shared_memory = SharedMemory()
        self._memory_scanned_at = 0.0

    @property
    def scratch(self) -> list[Path]:
        return self._context.scratch

    def take_over(self, processes: Iterable[Process]) -> None:
        """Also run these processes from now on. Raises NetworkError if no port is free."""
        for process in processes:
            if process.name not in self.supervised:
                self.supervised[process.name] = Supervision(process)
                self.ports[process.name] = {
                    name: self._claims.claim(preferred, fixed=name in process.fixed_ports)
                    for name, preferred in process.ports.items()
                }

    def has_published(self, addresses: Addresses) -> bool:
        """Return whether the published addresses are those of this machine, not of a node that it replaces."""
        return all(
            addresses.hosts.get(name) == self.address and addresses.ports.get(name) == ports
            for name, ports in self.ports.items()
        )

    def reap(self, now: float, *, ending: bool) -> list[Process]:
        """Collect the exit codes of processes that have ended since the last call, and return these processes.

        `ending`: the attempt ends, so that nothing is started again.
        """
        codes = {name: code for name, child in self.children.items() if (code := child.poll()) is not None}
        self._kill_groups(codes)
        ended = []
        for name, code in codes.items():
            del self.children[name]
            if probe := self.probes.pop(name, None):
                probe.stop()
            served = self.liveness_monitor.ended(name) > 0
            self._kill_at.pop(name, None)
            supervision = self.supervised[name]
            has_message = code in (exit_codes.FAILED, exit_codes.USAGE_ERROR, exit_codes.UNRECOVERABLE)
            if has_message and not ending and not supervision.reason:
                supervision.reason = last_error(self.attempt.path / supervision.process.log)
            supervision.exited(now, code, ending=ending, served=served)
            self._journal.write(ProcessExited(name, code, supervision.state, supervision.reason or None))
            ended.append(supervision.process)
        self._shared_memory.unlink()
        return ended

    def tick(self, now: float, view: FleetView, addresses: Addresses, *, environments: bool = True) -> None:
        """Start, restart and end processes as the head's newest view and the monotonic clock require.

        The addresses of all processes are filled into command lines. `environments`: whether they load on this node.
        """
        if now - self._memory_scanned_at >= MEMORY_SCAN_S:
            self._memory_scanned_at = now
            self._scan_memory(self.children)
        self.liveness_monitor.check(now)
        self._continue_stopped()
        ready, lost = set(view.ready), set(view.lost)
        for supervision in self.supervised.values():
            process = supervision.process
            if process.name in lost:
                self._kill(process.name)
                continue
            probe = self.probes.get(process.name)
            order = view.units.get(process.restart_group) if process.restart_group else None
            decision = supervision.tick(
                now,
                prerequisites=all(name in ready or name in lost for name in process.after)
                and (environments or process.role != TASK_ROLE),
                ready=supervision.running and (probe is None or probe.ready),
                unresponsive=self._unresponsive(process, view),
                silent_s=self.liveness_monitor.of(process.name).silent_s,
                order=order,
            )
            if decision == "start":
                if not self._replace_taken_ports(process) and not self._importing(process, addresses):
                    self._start(supervision, now, addresses, order.generation if order else 0)
            elif decision == "dump_and_kill":
                self._dump_stacks(process.name, now)
            elif decision == "kill" or now >= self._kill_at.get(process.name, math.inf):
                self._kill(process.name)

    def _unresponsive(self, process: Process, view: FleetView) -> str:
        liveness = self.liveness_monitor.of(process.name)
        if process.role == "trainer":
            # Ranks wait for one another, so one unresponsive rank silences all of them. Only the head sees all ranks,
            # and says which one to end. Its view may be old: a rank with a fresh heartbeat has recovered since.
            return view.hung.get(process.name, "") if liveness.silent_s > self._stopped_s else ""
        return f"unresponsive: {liveness.report().text}" if liveness.unresponsive else ""

    def _continue_stopped(self) -> None:
        for name, child in self.children.items():
            liveness = self.liveness_monitor.of(name)
            if liveness.stopped and liveness.silent_s > self._stopped_s and name not in self._kill_at:
                child.resume()
                self._journal.write(ProcessContinued(name, round(liveness.silent_s, 1)))

    def _dump_stacks(self, name: str, now: float) -> None:
        child, liveness, supervision = self.children[name], self.liveness_monitor.of(name), self.supervised[name]
        last = liveness.heartbeat
        event = ProcessUnresponsive(name, round(liveness.silent_s, 1), last.phase, last.step, supervision.reason)
        self._journal.write(event)
        # Before its first heartbeat a process has no handler for this signal, and would die of it.
        if last.number and supervision.process.heartbeats is not None:
            child.send(heartbeats.DUMP_SIGNAL)
        child.send(signal.SIGCONT)  # a stopped process handles no other signal
        self._kill_at[name] = now + DUMP_S

    def renew(self, addresses: Addresses) -> None:
        """End the processes whose command lines change with these addresses. `tick` starts them again."""
        for name in list(self.children):
            supervision = self.supervised[name]
            if self._command(supervision.process, addresses) == self._started_with[name]:
                continue
            if supervision.renew("processes that it talks to have moved or are gone") == "kill":
                self._kill(name)

    def send(self, role: str, number: signal.Signals) -> None:
        for name, child in self.children.items():
            if self.supervised[name].process.role == role:
                child.send(number)

    def terminate(self) -> None:
        self._scan_memory(self.children)
        for child in self.children.values():
            child.terminate()

    def kill(self) -> None:
        self._scan_memory(self.children)
        for child in self.children.values():
            child.kill()

    def close(self) -> None:
        """Kill everything that is left, and remove directories, shared memory and port claims."""
        self._kill_groups(self.children)
        for name in self.children:
            self.liveness_monitor.ended(name)
        self._fork_servers.close()
        self._shared_memory.unlink_within(UNLINK_S)
        self._context.remove_scratch()
        self._claims.release()

    def reports(self) -> dict[str, ProcessReport]:
        return {name: self._report(supervision) for name, supervision in self.supervised.items()}

    @property
    def states(self) -> dict[str, tuple[object, ...]]:
        """The parts of the reports that count as news, by name. The age of heartbeats does not."""
        return {
            name: (supervision.state, supervision.restarts, supervision.generation, self._is_healthy(supervision))
            for name, supervision in self.supervised.items()
        }

    def _is_healthy(self, supervision: Supervision) -> bool:
        probe = self.probes.get(supervision.process.name)
        return probe.healthy if probe is not None else supervision.state is ProcessState.READY

    def _report(self, supervision: Supervision) -> ProcessReport:
        name = supervision.process.name
        child, liveness = self.children.get(name), self.liveness_monitor.of(name)
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
            heartbeat=liveness.report() if child and liveness != Liveness() else None,
        )

    def _kill(self, name: str) -> None:
        if child := self.children.get(name):
            self._scan_memory([name])
            child.kill()

    def _kill_groups(self, names: Collection[str]) -> None:
        self._scan_memory(names)
        for name in names:
            self.children[name].kill()
            self._shared_memory.ended(self.children[name].pid)

    def _scan_memory(self, names: Collection[str]) -> None:
        # Scan before every kill: a dead process has no memory maps, so its shared memory could not be found afterwards.
        self._shared_memory.scan([self.children[name].pid for name in names])

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
            if storage.is_transient(error):  # an outage of the log's file system: not the fault of the process
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

    def _replace_taken_ports(self, process: Process) -> bool:
        """Claim other ports for those where another user listens. The process starts once they are published."""
        ports = self.ports[process.name]
        movable = {name: port for name, port in ports.items() if name not in process.fixed_ports}
        taken = [name for name, port in movable.items() if self._claims.is_lost(port)]
        for name in taken:
            instead = self._claims.claim(ports[name] + 1)
            self._journal.write(PortTaken(process.name, ports[name], instead))
            ports[name] = instead
        return bool(taken)

    def _importing(self, process: Process, addresses: Addresses) -> bool:
        if not self._shares_imports(process):
            return False
        argv, env, _, _ = self._command(process, addresses)
        # The server needs no secret. Each forked process gets it through a pipe.
        public = {name: value for name, value in (dict(os.environ) | env).items() if name != VARIABLE}
        return self._fork_servers.importing(process.imports, argv[0], public)

    def _shares_imports(self, process: Process) -> bool:
        alike = [each for each in self.supervised.values() if each.process.imports == process.imports]
        return bool(process.imports) and len(alike) > 1

    def _spawn(
        self, process: Process, argv: tuple[str, ...], env: dict[str, str], page: heartbeats.HeartbeatPage | None
    ) -> ProcessGroup:
        passed = {heartbeats.VARIABLE: page.descriptor} if page else {}
        if VARIABLE not in self.plan.env:
            return self._fork_or_execute(process, argv, env, passed)
        secret = env.pop(VARIABLE)
        with handing_over(secret) as (descriptor, variables):
            return self._fork_or_execute(process, argv, env | variables, {**passed, HANDED_OVER: descriptor})

    def _fork_or_execute(
        self, process: Process, argv: tuple[str, ...], env: dict[str, str], passed: dict[str, int]
    ) -> ProcessGroup:
        log, cwd = self.attempt.path / process.log, Path(self.plan.run_dir)
        server = self._fork_servers.of(process.imports) if self._shares_imports(process) else None
        if server is not None:
            return server.fork(argv, env, log, cwd, passed)
        ignore_term = process.role in _CHECKPOINT_ROLES
        return Child(argv, env, log, cwd, tuple(passed.values()), ignore_term=ignore_term)

    def _command(self, process: Process, addresses: Addresses) -> Command:
        fill = self._fill(process, addresses)
        # Secrets go into the environment only: all users can read command lines.
        fill_env = self._fill(process, addresses, self._secrets)
        filled = {key: fill_env(value) for key, value in {**self.plan.env, **process.env}.items()}
        env = {key: value for key, value in filled.items() if value}
        if process.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(gpu) for gpu in process.gpus)
        files = {name: fill(text) for name, text in process.files.items()}
        # A trainer that shares GPUs with engines waits for them at its start only. It need not restart without them.
        needed = frozenset[str]() if process.role == "trainer" else frozenset(process.after)
        return tuple(map(fill, process.argv)), env, files, frozenset(addresses.lost) & needed

    def _fill(self, process: Process, addresses: Addresses, more: Mapping[str, str] = {}) -> Callable[[str], str]:
        values = {**self._context.values(process), **more}
        return lambda text: resolve(text, process.name, addresses, values)


def _secrets(plan: Plan) -> dict[str, str]:
    if not any("${secret}" in value for value in plan.env.values()):
        return {}
    secret = read(Path(plan.run_dir))
    return {"secret": secret, "generate_token": generate_token(secret)}


def _visible(gpu: int) -> str:
    """Return CUDA's name for the `gpu`-th GPU of this allocation."""
    allocated = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    return allocated[gpu] if gpu < len(allocated) else str(gpu)

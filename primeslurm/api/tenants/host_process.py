"""The tenant host of a deployment: `python -m primeslurm.api.tenants.host_process`.

It starts, stops and restarts the runs of tenants, as their `wanted` files say. Each run is a local run with its own
process groups, which outlive this process: a new host finds them by their job records. On SIGUSR1 or SIGTERM, the host
ends all runs with a last checkpoint, and then itself.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from primeslurm.api.jobs import record_interrupted_submission
from primeslurm.api.tenants.disk_use import DiskMonitor
from primeslurm.api.tenants.host import Action, StarterState, TenantSupervisor, View
from primeslurm.api.tenants.recipes import UNKNOWN, DeploymentUrls, deployment_recipe
from primeslurm.base import durable, files
from primeslurm.base.errors import PrimeslurmError
from primeslurm.base.files import FileWatcher
from primeslurm.base.parent_death import end_with_parent
from primeslurm.plan.model import Plan
from primeslurm.records import resolved_recipe as recipe_record
from primeslurm.records.fleet import Outcome
from primeslurm.records.heartbeats import liveness
from primeslurm.run.directory import CANCEL_NOW, Attempt, RunDirectory
from primeslurm.run.tenants import TenantDirectory, TenantState, Wanted, remove_key, tenants_of, user_of
from primeslurm.slurm.local import submit
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport import secret

log = logging.getLogger(__name__)
POLL_S = 1.0
# Longest last line of a starter's log that becomes a reason, in characters.
_REASON = 300


@dataclass
class HostedTenant:
    """A tenant, its state, and the process that starts its run."""

    tenant: TenantDirectory
    wanted: Wanted | None = None  # None until the file is read for the first time
    supervisor: TenantSupervisor = field(default_factory=TenantSupervisor)
    starter: subprocess.Popen[bytes] | None = None
    recorded: TenantState = field(default_factory=TenantState)
    _plan: tuple[int, Plan] | None = None
    _recipe: FileWatcher = field(init=False)
    _urls: DeploymentUrls | None = None

    def __post_init__(self) -> None:
        self._recipe = FileWatcher(self.tenant.run.path / recipe_record.FILE)

    def plan(self, attempt: Attempt) -> Plan:
        """Return the plan of an attempt. It is read once. Raises RunError."""
        if self._plan is None or self._plan[0] != attempt.number:
            self._plan = (attempt.number, attempt.plan())
        return self._plan[1]

    def urls(self) -> DeploymentUrls | None:
        """Return the addresses that its run knows, from a file that is decoded after a change only."""
        if (recipe := self._recipe.changed()) is not None:
            section = recipe.get("tenant") or {}
            self._urls = DeploymentUrls(section.get("service", UNKNOWN), section.get("router", UNKNOWN))
        return self._urls

    @property
    def is_over(self) -> bool:
        """True after the end of its run, if it is removed."""
        return self.recorded.state == "removed"


class TenantHost:
    """All tenants of a deployment."""

    def __init__(self, run_dir: Path, urls: DeploymentUrls) -> None:
        """Raises RunError if the recipe of the deployment cannot be read."""
        self._run_dir, self._urls = run_dir, urls
        limits = deployment_recipe(run_dir).tenants
        assert limits is not None
        self._max_tenants = limits.max_tenants
        self.disk = DiskMonitor(run_dir, limits)
        self._hosted: dict[str, HostedTenant] = {}
        self.ending = False

    def tick(self, now: float) -> bool:
        """Look at every tenant, and act. Return whether a run is active. `now`: monotonic clock [s]."""
        present = [hosted for hosted in self._look() if not hosted.is_over]
        wanted = [hosted.tenant.name for hosted in present if hosted.wanted not in (None, "removed")]
        admitted, active = set(wanted[: self._max_tenants]), False
        for hosted in present:
            name = hosted.tenant.name
            try:
                view = self._view(hosted)
                action = hosted.supervisor.decide(view, now, admitted=name in admitted, ending=self.ending)
                self._act(hosted, action)
                self._record(hosted)
                active |= view.active or hosted.starter is not None
            except (PrimeslurmError, OSError, ValueError) as error:  # the others must not suffer
                log.warning("tenant %s: %s", name, error)
                active |= hosted.starter is not None or self.ending  # its run may be active
        return active

    def _look(self) -> list[HostedTenant]:
        """Read each `wanted` file. A tenant whose file cannot be read keeps its last known value."""
        try:
            found = tenants_of(self._run_dir)
        except OSError as error:
            log.warning("%s", error)
            return list(self._hosted.values())
        for tenant in found:
            hosted = self._hosted.setdefault(tenant.name, HostedTenant(tenant))
            if not hosted.is_over:
                try:
                    hosted.wanted = tenant.wanted
                except (OSError, ValueError) as error:
                    log.warning("tenant %s: %s", tenant.name, error)
        return [self._hosted[tenant.name] for tenant in found]

    def _view(self, hosted: HostedTenant) -> View:
        """Raises PrimeslurmError, OSError or ValueError if files of the tenant are damaged or cannot be read."""
        tenant = hosted.tenant
        if hosted.wanted is None:
            raise ValueError("nobody knows whether it is wanted")
        code = hosted.starter.poll() if hosted.starter else None
        starter: StarterState = "running" if code is None else "failed" if code else "succeeded"
        view = partial(View, hosted.wanted, tenant.wanted_since, starter="none" if hosted.starter is None else starter)
        reason = _last_line(tenant.log) if code else ""
        if code is not None:
            hosted.starter = None
        if not tenant.run.exists() or not tenant.run.attempts():
            return view(reason=reason)
        record_interrupted_submission(tenant.run)
        attempt = tenant.run.latest()
        job, end = attempt.job(), attempt.end()
        local_id = job.job_id if job is not None and job.host == socket.gethostname() else ""
        return view(
            active=bool(local_id) and submit.is_running(hosted.plan(attempt), local_id),
            current=hosted.urls() == self._urls,
            completed=end is not None and end.outcome == Outcome.COMPLETED,
            committed=checkpoints.newest(tenant.run.path) or 0,
            reason=reason or (end.reason if end else ""),
            disk=self.disk.uses.get(tenant.name),
        )

    def _act(self, hosted: HostedTenant, action: Action) -> None:
        tenant = hosted.tenant
        if action == "start":
            hosted.starter = self._start(tenant)
        elif action == "end_starter" and hosted.starter is not None:
            hosted.starter.kill()
        elif action == "stop":
            durable.write(tenant.run.latest().cancel_file, "")
        elif action == "end":
            attempt = tenant.run.latest()
            durable.write(attempt.cancel_file, CANCEL_NOW)
            if (job := attempt.job()) is not None:
                submit.cancel(attempt.plan(), job.job_id)
        if action != "nothing":
            log.info("tenant %s: %s (%s)", tenant.name, action, hosted.supervisor.reason or hosted.supervisor.state)

    def _start(self, tenant: TenantDirectory) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "primeslurm.api.tenants.starting", "--run-dir", str(self._run_dir)]
        argv += ["--tenant", tenant.name, "--service", self._urls.service, "--router", self._urls.router]
        with tenant.log.open("ab") as output:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=end_with_parent
            )

    def _record(self, hosted: HostedTenant) -> None:
        state = hosted.supervisor
        record = TenantState(state.state, state.reason, state.failures, hosted.recorded.time)
        if record != hosted.recorded:
            if state.state == "removed":  # before, the run needed the key for its last checkpoint
                remove_key(self._run_dir, user_of(hosted.tenant.name))
            record = TenantState(state.state, state.reason, state.failures, time.time())
            hosted.tenant.record(record)
            hosted.recorded = record

    def end_all(self) -> None:
        """Tell all runs to end without a last checkpoint."""
        for hosted in self._hosted.values():
            with contextlib.suppress(PrimeslurmError, OSError, ValueError):
                if hosted.starter is not None:
                    hosted.starter.kill()
                    hosted.starter.wait()
                self._act(hosted, "end")  # a starter may have started the run already


def _cancelled_now(run_dir: Path) -> bool:
    with contextlib.suppress(PrimeslurmError, OSError, ValueError):  # it may be readable in the next second
        file = RunDirectory(run_dir).latest().cancel_file
        return files.is_file(file) and files.read_text(file) == CANCEL_NOW
    return False


def _last_line(path: Path) -> str:
    try:
        lines = files.read_bytes(path)[-8192:].decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("error: ")[:_REASON] if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.api.tenants.host_process", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--service", required=True)
    parser.add_argument("--router", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signals: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda received, _: signals.append(received))
    secret.take()
    host, reporter = TenantHost(arguments.run_dir, DeploymentUrls(arguments.service, arguments.router)), liveness()
    host.disk.start()
    reporter.enter("watch")
    while True:
        host.ending = bool(signals)
        active = host.tick(time.monotonic())
        reporter.heartbeat()
        if host.ending and not active:
            return 0
        late = len(signals) > 1 and signals[-1] == signal.SIGTERM  # no time is left for checkpoints
        if late or (host.ending and _cancelled_now(arguments.run_dir)):
            host.end_all()
            return 1
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())

"""The fault table: damage to a running deployment, and how it must recover.

`python -m benchmarks fault_table` runs the tests, and records the cost of each fault.
"""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from primeslurm.api.jobs import job_query
from primeslurm.base.files import read_json
from primeslurm.base.hostlists import expand
from primeslurm.records.events.nodes import NodeLost
from primeslurm.records.events.training import CheckpointLoaded
from primeslurm.run.bad_nodes import BadNodeLedger
from primeslurm.run.diagnosis.doctor import diagnose
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.history import events
from primeslurm.run.status.liveness import RECHECK_S, SILENT_S
from primeslurm.run.status.run_status import RunStatus, read_status
from primeslurm.slurm.client import SlurmClient
from primeslurm.wire.transport import secret
from tests.support.emulation import Deployment, Snapshot
from tests.support.faults import kill_controller, kill_node, limit_time, revive_controller, revive_node, set_down, warn
from tests.support.waiting import wait_until

SIGNAL_S = 120
"""How long before its time limit the recipe's jobs get a signal [s]."""
Noticed = Callable[[RunStatus], bool]


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    `inject` does the damage, and returns a condition that holds once the deployment has noticed. `repair` undoes
    lasting damage, before recovery or (`repair_late`) after it.
    """

    name: str
    what: str
    inject: Callable[[Deployment], Noticed]
    ends_attempt: bool | None = False
    """Whether a new attempt follows; None if it depends on what is being written."""
    repair: Callable[[Deployment], None] | None = None
    repair_late: bool = False
    repeats: bool = False
    """Whether uncommitted steps are trained again within the attempt."""
    options: tuple[str, ...] = ()
    """Options of `submit`, for a fault that needs its own run."""
    campaign: bool = False
    """Whether it takes too long for every commit."""


@dataclass(frozen=True)
class Cost:
    """Cost of a fault."""

    fault: str
    what: str
    new_attempts: int
    """0 if the run recovered in place."""
    seconds: float
    """Seconds until all processes are healthy and one more step is trained."""
    committed_steps_lost: int
    steps_repeated: int
    """Steps that were trained but not committed."""
    rollouts_begun_again: int
    """Rollouts that were in flight."""
    finished_rollouts_lost: int
    """Sampled by a policy that was lost with its uncommitted step."""
    committed_rollouts_lost: int
    """Sampled by policies that are still valid."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def measure_cost(deployment: Deployment, fault: Fault) -> Cost:
    """Inject a fault into a healthy run, wait for recovery, and return the cost."""
    if fault.options:
        deployment.submit(*fault.options)
    deployment.running()
    before = deployment.snapshot()
    began = time.monotonic()
    noticed_by = fault.inject(deployment)
    try:
        deployment.wait(noticed_by)
    finally:
        if fault.repair and not fault.repair_late:
            fault.repair(deployment)
    noticed = deployment.snapshot()

    def recovered(status: RunStatus) -> bool:
        beyond = noticed.step if noticed.attempt == before.attempt else before.committed
        return deployment.healthy(status) and (status.metrics.get("step") or 0) > beyond

    deployment.wait(recovered)
    seconds = time.monotonic() - began
    state, recovered_at = deployment.run.latest().path / "state" / "orchestrator.json", time.time()
    wait_until(lambda: state.stat().st_mtime > recovered_at)  # so that it has all counts
    after = deployment.snapshot()
    if fault.repair and fault.repair_late:
        fault.repair(deployment)
    return _cost(fault, before, after, seconds, deployment)


def _cost(fault: Fault, before: Snapshot, after: Snapshot, seconds: float, deployment: Deployment) -> Cost:
    again = after.attempt > before.attempt
    resumed = before.step
    if again:
        end = deployment.run.attempt(after.attempt - 1).end()
        resumed = (end.committed_step if end else None) or before.committed
    elif fault.repeats:
        resumed = _resumed_step(deployment)
    gone = before.missing(after)
    valid = [name for name in gone if before.groups[name].newest <= resumed]
    return Cost(
        fault=fault.name,
        what=fault.what,
        new_attempts=after.attempt - before.attempt,
        seconds=round(seconds, 1),
        committed_steps_lost=max(0, before.committed - after.committed),
        steps_repeated=max(0, before.step - resumed),
        rollouts_begun_again=before.in_flight if again else max(0, after.restarted - before.restarted),
        finished_rollouts_lost=len(gone) - len(valid),
        committed_rollouts_lost=len(valid),
    )


def _resumed_step(deployment: Deployment) -> int:
    """Return the step from which the trainer was last started."""
    loads = [event for event in events(deployment.run) if isinstance(event, CheckpointLoaded)]
    return loads[-1].step


def _next_attempt(deployment: Deployment) -> Noticed:
    attempt = deployment.status().attempt
    return lambda status: status.attempt > attempt


def _restarted(deployment: Deployment, name: str) -> Noticed:
    before = deployment.process(name)
    return lambda status: any(
        p.name == name and p.restarts > before.restarts and p.pid != before.pid for p in status.processes
    )


def _kill(name: str) -> Callable[[Deployment], Noticed]:
    def inject(deployment: Deployment) -> Noticed:
        noticed, pid = _restarted(deployment, name), deployment.process(name).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return noticed

    return inject


def _hang(name: str, what: str = "hang") -> Callable[[Deployment], Noticed]:
    def inject(deployment: Deployment) -> Noticed:
        noticed, addresses = _restarted(deployment, name), read_json(deployment.run.latest().addresses_file)
        assert addresses is not None
        url = f"http://{addresses['hosts'][name]}:{addresses['ports'][name]['http']}/emulated/{what}"
        token = {"Authorization": f"Bearer {secret.read(deployment.run.path)}"}
        httpx.post(url, headers=token, timeout=60).raise_for_status()
        return noticed

    return inject


def _all(*injections: Callable[[Deployment], Noticed]) -> Callable[[Deployment], Noticed]:
    def inject(deployment: Deployment) -> Noticed:
        conditions = [each(deployment) for each in injections]
        return lambda status: all(condition(status) for condition in conditions)

    return inject


def _kill_for_good(name: str) -> Callable[[Deployment], Noticed]:
    def inject(deployment: Deployment) -> Noticed:
        noticed, pid = _next_attempt(deployment), deployment.process(name).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return noticed

    return inject


def _preempt(deployment: Deployment) -> Noticed:
    noticed, job = _next_attempt(deployment), deployment.run.latest().job()
    assert job is not None
    warn(deployment.cluster.spec.slurm_conf, job.job_id)
    return noticed


def _run_out_of_time(deployment: Deployment) -> Noticed:
    elapsed_s = deployment.status().elapsed_s
    assert elapsed_s is not None
    # Slurm rounds to minutes, and checks time limits every 30 s, for jobs whose signal is due before the next check.
    _limit_time(deployment, math.ceil((elapsed_s + SIGNAL_S) / 60))
    return _next_attempt(deployment)


def _give_time(deployment: Deployment) -> None:
    _limit_time(deployment, 60)


def _limit_time(deployment: Deployment, minutes: int) -> None:
    job = deployment.run.latest().job()
    assert job is not None
    limit_time(deployment.cluster.spec.slurm_conf, job.job_id, minutes)


def _after(seconds: float) -> Noticed:
    """Return a condition that holds after this time, for damage that nothing reports."""
    until = time.monotonic() + seconds
    return lambda status: time.monotonic() > until


def _crash_slurmctld(deployment: Deployment) -> Noticed:
    kill_controller(deployment.cluster)
    return _after(3.0)


def _lose_nodes(*processes: str) -> Callable[[Deployment], Noticed]:
    """Cut the power of the nodes of these processes."""

    def inject(deployment: Deployment) -> Noticed:
        lost = [deployment.process(name).node for name in processes]
        attempt = deployment.status().attempt
        for node in lost:
            kill_node(deployment.cluster, node)

        def noticed(status: RunStatus) -> bool:
            used = {p.node for p in status.processes if p.name in processes and p.state != "LOST"}
            return status.attempt > attempt or used.isdisjoint(lost)

        return noticed

    return inject


def _lose_control_spare_and_node(process: str) -> Callable[[Deployment], Noticed]:
    """Take the second node of the control processes away, then cut the power of another process's node.

    Slurm requeues only the component of the control processes, and ends the others.
    """

    def inject(deployment: Deployment) -> Noticed:
        noticed, run, conf = _next_attempt(deployment), deployment.run.latest(), deployment.cluster.spec.slurm_conf
        job = run.job()
        assert job is not None
        state = SlurmClient(str(conf)).job(job.job_id)
        assert state is not None
        head = deployment.process("orchestrator").node
        (spare,) = [node for node in expand(state.components[0].nodes) if node != head]
        set_down(conf, spare, "test")
        deployment.wait(lambda status: spare in {e.node for e in events(deployment.run) if isinstance(e, NodeLost)})
        kill_node(deployment.cluster, deployment.process(process).node)
        return noticed

    return inject


def _revive_nodes(deployment: Deployment) -> None:
    for name in [daemon.name for daemon in deployment.cluster.daemons if not daemon.alive]:
        revive_node(deployment.cluster, name)
    ledger = BadNodeLedger(deployment.runs)
    for entry in ledger.entries(time.time()):
        ledger.forget(entry.node)


def _kill_head(deployment: Deployment) -> Noticed:
    noticed, status = _next_attempt(deployment), deployment.status()
    leftovers = f"primeslurm-*{status.run_id[-8:]}-{status.attempt}-a0*"
    assert list(Path(tempfile.gettempdir()).glob(leftovers))
    os.kill(deployment.head_agent(), signal.SIGKILL)
    _check_that_death_of_head_is_reported(deployment)
    wait_until(lambda: not list(Path(tempfile.gettempdir()).glob(leftovers)), lambda: f"nobody has removed {leftovers}")
    return noticed


def _check_that_death_of_head_is_reported(deployment: Deployment) -> None:
    """Check that `status` and `doctor` report a dead head: at once if Slurm does, or else after its last heartbeat
    expires.

    They watch its file for some seconds more, in total less than 15 s on an idle machine.
    """
    run, attempt = deployment.run, deployment.run.latest()
    reports = {"status": lambda: _status_text(run), "doctor": lambda: _doctor_text(run, attempt)}
    assert SILENT_S + RECHECK_S < 15.0
    while reports and run.latest().number == attempt.number:
        for name, report in list(reports.items()):
            age_s = time.time() - attempt.fleet_file.stat().st_mtime
            text = report()
            if re.search(r"the head's agent was killed|the head \(on .*\) has not written for", text):
                del reports[name]
            else:
                assert age_s <= SILENT_S, f"{name} says {text!r} of a head whose last heartbeat was {age_s:.0f} s ago"
        time.sleep(0.2)


def _status_text(run: RunDirectory) -> str:
    status = read_status(run, job_query(run))
    return f"{status.phase} {status.reason} {status.silence.text if status.silence else ''}"


def _doctor_text(run: RunDirectory, attempt: Attempt) -> str:
    diagnosis = diagnose(run, attempt, job_query(run))
    return f"{diagnosis.outcome} {diagnosis.reason}"


def _fill_disk(deployment: Deployment) -> Noticed:
    filler = deployment.runs / "filler"
    try:
        with filler.open("wb", buffering=0) as handle:
            while True:
                handle.write(b"x" * 65536)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    return _after(10.0)


def _free_disk(deployment: Deployment) -> None:
    (deployment.runs / "filler").unlink()


def _slow_files(deployment: Deployment) -> Noticed:
    deployment.slow_files.touch()
    return _after(20.0)


def _fast_files(deployment: Deployment) -> None:
    deployment.slow_files.unlink()


def _submit_again(deployment: Deployment) -> Noticed:
    recipe, site = "tests/emulated/small.yaml", deployment.cluster.spec.site_file
    again = deployment.command("submit", recipe, "--emulate", "--site", site, "--name", deployment.run.name)
    assert again.returncode == 2 and "is in use" in again.stderr, again
    return lambda status: True


FAULTS = (
    Fault("engine killed", "SIGKILL to a decode engine", _kill("decode-r0-1"), campaign=True),
    Fault(
        "engine hangs",
        "one engine keeps its connections and answers nothing, the server of another answers for a core that does not",
        _all(_hang("decode-r1-0"), _hang("decode-r0-1", "hang_core")),
        campaign=True,
    ),
    Fault("router killed", "SIGKILL to the router of one replica", _kill("router-1"), campaign=True),
    Fault(
        "environment crash",
        "SIGKILL to an environment worker with its rollouts",
        _kill("environment-swe-0"),
        campaign=True,
    ),
    Fault("orchestrator killed", "SIGKILL to the orchestrator", _kill("orchestrator")),
    Fault(
        "trainer rank killed",
        "SIGKILL to one trainer rank",
        _kill_for_good("trainer-rank-2"),
        ends_attempt=True,
        campaign=True,
    ),
    Fault("preemption", "USR2 to every task of the job", _preempt, ends_attempt=True),
    Fault(
        "slurmctld restart",
        "SIGKILL to Slurm's controller, started again after 3 s",
        _crash_slurmctld,
        repair=lambda deployment: revive_controller(deployment.cluster),
    ),
    Fault("duplicate submit", "the same run is submitted again", _submit_again),
    Fault(
        "slow shared file system",
        "for 20 s, every fsync and every rename of every process takes a second longer",
        _slow_files,
        repair=_fast_files,
        campaign=True,
    ),
    Fault(
        "disk full",
        "not a byte is free in the directory of runs, for 10 s",
        _fill_disk,
        ends_attempt=None,
        repair=_free_disk,
    ),
    Fault(
        "node down",
        "a node with decode engines loses power; a spare takes its place",
        _lose_nodes("decode-r0-0"),
        repair=_revive_nodes,
        repair_late=True,
    ),
    Fault(
        "trainer node down",
        "a node with trainer ranks loses power; a spare takes its place, the ranks start again from the last commit",
        _lose_nodes("trainer-rank-2"),
        repeats=True,
        campaign=True,
        repair=_revive_nodes,
        repair_late=True,
    ),
    Fault(
        "environment node down",
        "a node with environment workers loses power; there is no spare, its workers move to the other one",
        _lose_nodes("environment-swe-0"),
        campaign=True,
        repair=_revive_nodes,
        repair_late=True,
    ),
    Fault(
        "two nodes down",
        "a node with trainer ranks and one with prefill engines lose power; there are no spares for them",
        _lose_nodes("trainer-rank-2", "prefill-r1-0"),
        ends_attempt=True,
        repair=_revive_nodes,
        options=("--set", "deployment.spares.train=0"),
        campaign=True,
    ),
    Fault(
        "node down, control's spare gone",
        "an administrator takes the second node of the control processes, then a node with prefill engines loses power",
        _lose_control_spare_and_node("prefill-r0-0"),
        ends_attempt=True,
        campaign=True,
        repair=_revive_nodes,
    ),
    Fault(
        "head agent killed",
        "SIGKILL to the agent that is the head; its node counts as bad then",
        _kill_head,
        ends_attempt=True,
        campaign=True,
        repair=_revive_nodes,
        repair_late=True,
    ),
    Fault(
        "time limit",
        "the job's time is nearly over: USR2 arrives two minutes before the end",
        _run_out_of_time,
        ends_attempt=True,
        campaign=True,
        repair=_give_time,
    ),
)

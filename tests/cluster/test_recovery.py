"""Failing nodes on a real Slurm: spares, replicas that are given up, a lost head, the ledger of bad nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from primeslurm.api.submission import avoid_bad_nodes
from primeslurm.base.files import read_json, write_json
from primeslurm.base.hostlists import expand
from primeslurm.node.attempt.attempt_end import exclude_bad_nodes
from primeslurm.node.entry import AgentTask
from primeslurm.plan.model import HetGroup, JobOptions, Node, Plan, Process, Replica, Totals
from primeslurm.plan.supervision import Health
from primeslurm.recipe.site import Site
from primeslurm.records.attempt import JobRecord
from primeslurm.records.events.nodes import AddressesPublished, LaunchedAgain, NodeLost, NodesAssigned, PreflightDone
from primeslurm.records.fleet import AgentReport
from primeslurm.records.record import Event
from primeslurm.run.bad_nodes import BadNodeLedger, excluded
from primeslurm.run.diagnosis.doctor import diagnose
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.status.summary import events
from primeslurm.slurm.executor import submit
from primeslurm.slurm.render import render
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.support.faults import kill_controller, kill_node, revive_controller, revive_node
from tests.support.plans import SERVER, python
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster

E = TypeVar("E", bound=Event)
CHECKOUT = str(Path(__file__).parents[2])
SILENT_S = 15
# succeeds once the test allows it
UNTIL_DONE = python("import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.2)", "${run_dir}/done")


def process(name: str, node: int, argv: tuple[str, ...], **options: Any) -> Process:
    role = name.split("-")[0]
    return Process.model_validate(
        {"name": name, "role": role, "node": node, "argv": argv, "log": f"logs/{role}/{name}.log", **options}
    )


def server(name: str, node: int, *uses: str) -> Process:
    """Return a server process that is told the addresses of the processes in `uses`."""
    argv = python(SERVER, "${host}", "${port:http}", *(f"${{addr:{other}:http}}" for other in uses))
    health = Health(port="http", path="/x")
    return process(name, node, argv, ports={"http": 21000 + 10 * node}, health=health, after=uses)


def make_plan(run_dir: Path, site: Site, replicas: int, spares: int) -> Plan:
    """Return a plan with orchestrator and trainer on node 0, and an engine with its router on each further node."""
    control = (
        process("orchestrator", 0, UNTIL_DONE),
        process("trainer-rank-0", 0, UNTIL_DONE, restart="attempt"),
    )
    nodes = [control]
    for i in range(replicas):
        nodes.append((server(f"engine-r{i}-0", i + 1), server(f"router-{i}", i + 1, f"engine-r{i}-0")))
    count = len(nodes) + spares
    gpu = HetGroup(index=0, name="all", nodes=count, spares=spares, partition="gpu", gres=None, cpus_per_task=1)
    return Plan(
        schema=1,
        run=run_dir.name,
        run_dir=str(run_dir),
        task="rl",
        layout="single",
        executor="slurm",
        device="cpu",
        python=sys.executable,
        job=JobOptions(name=run_dir.name, time="00:10:00", signal_s=40),
        groups=(gpu,),
        nodes=tuple(
            Node(index=i, group=0, role="train", index_in_group=i, processes=processes)
            for i, processes in enumerate(nodes)
        ),
        replicas=tuple(
            Replica(index=i, router=f"router-{i}", engines=(f"engine-r{i}-0",), nodes=(i + 1,)) for i in range(replicas)
        ),
        totals=Totals(
            nodes=count, gpus=0, trainer_gpus=0, engines=replicas, inference_nodes=replicas, routers=replicas
        ),
        env={"TMPDIR": "${tmp}", "PYTHONPATH": CHECKOUT},
        addresses=site.network.addresses,
        stall_timeout_s=600,
        max_attempts=3,
        node_silent_s=SILENT_S,
    )


class Job:
    """A run of such a plan on the shared cluster."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster, self.plan = cluster, plan
        self.run = RunDirectory(Path(plan.run_dir))
        self.run.path.mkdir(parents=True)
        attempt = self.run.attempt(1)
        attempt.prepare(plan)
        write_json(self.run.path / "lock.json", {"run_id": f"{plan.run}-1"})
        script = attempt.path / "job.sbatch"
        script.write_text(render(plan))
        conf = str(cluster.spec.slurm_conf)
        attempt.record_job(JobRecord("", "slurm", time.time(), conf, "w"))
        self.id = submit(plan, AgentTask(plan.run_dir, 1, "w"), script, conf, "w")
        attempt.record_job(JobRecord(self.id, "slurm", time.time(), conf, "w"))

    @property
    def attempt(self) -> Attempt:
        return self.run.latest()

    def wait(self, condition: Callable[[], object]) -> None:
        wait_until(condition, lambda: "\n".join(map(str, events(self.run))))

    def states(self) -> dict[str, str]:
        fleet = self.attempt.fleet()
        return fleet.states if fleet else {}

    def wait_for(self, *names: str, state: str = "HEALTHY") -> None:
        self.wait(lambda: {self.states().get(name) for name in names} == {state})

    def node_of(self, index: int) -> str:
        return self.attempt.assignment().agents[index].name

    def wait_for_move(self, index: int, node: str) -> None:
        """Wait until the head has replaced a node and published addresses and states that follow from it.

        The head writes the assignment first. Until it writes `fleet.json` again, the lost processes are HEALTHY there.
        """
        self.wait(lambda: self.node_of(index) == node)
        generation = self.attempt.assignment().generation

        def published() -> bool:
            times = [event.time for event in self.events(AddressesPublished) if event.generation >= generation]
            fleet = self.attempt.fleet()
            return bool(times) and fleet is not None and fleet.time >= times[0]

        self.wait(published)

    def heartbeat(self, index: int) -> AgentReport:
        report = self.attempt.heartbeat(index, self.attempt.assignment())
        assert report is not None
        return report

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in events(self.run) if isinstance(event, kind)]

    def finish(self) -> None:
        """Let it complete, and wait until Slurm has ended the job."""
        (self.run.path / "done").touch()
        self.wait(lambda: not self.active())

    def active(self) -> bool:
        job = self.cluster.client.job(self.id)
        return job is not None and job.active


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    site = Site.model_validate(yaml.safe_load(cluster.spec.site_file.read_text()))
    jobs: list[Job] = []

    def submit_plan(
        *,
        replicas: int,
        spares: int,
        without_address: str | None = None,
        prologue: str = "",
        launcher: tuple[str, ...] = (),
    ) -> Job:
        plan = make_plan(tmp_path / "runs" / "toy", site, replicas, spares)
        job = plan.job.model_copy(update={"prologue": (prologue,) if prologue else (), "launcher": launcher})
        plan = plan.model_copy(update={"job": job})
        addresses = {name: address for name, address in plan.addresses.items() if name != without_address}
        jobs.append(Job(cluster, plan.model_copy(update={"addresses": addresses})))
        return jobs[-1]

    yield submit_plan
    for job in jobs:
        if job.active():
            cluster.client.cancel(job.id)
            job.wait(lambda job=job: not job.active())
    for name in [daemon.name for daemon in cluster.daemons if not daemon.alive]:
        revive_node(cluster, name)
    wait_until(lambda: all(node.state == "idle" and node.responding for node in cluster.client.nodes()))


def test_run_survives_two_lost_nodes(cluster: Cluster, start: Callable[..., Job]) -> None:
    """A spare replaces the first node, the second node's replica is given up, and the run completes."""
    job = start(replicas=2, spares=1)
    everything = [process.name for process in job.plan.processes()]
    job.wait_for(*everything)
    pids = {name: report.pid for i in (0, 2) for name, report in job.heartbeat(i).processes.items()}

    first, spare = job.node_of(1), next(iter(job.events(NodesAssigned)[0].spares))
    kill_node(cluster, first)
    job.wait_for_move(1, spare)
    job.wait_for(*everything)
    address = job.plan.addresses[spare]
    assert read_json(job.attempt.addresses_file)["hosts"]["engine-r0-0"] == address
    log = job.attempt.path / "logs/router/router-0.log"
    job.wait(lambda: f" {address}:" in log.read_text().splitlines()[-1])  # the router was told where its engine is
    job.wait_for(*everything)

    second = job.node_of(2)
    kill_node(cluster, second)
    job.wait_for("engine-r1-0", "router-1", state="LOST")
    job.wait_for("engine-r0-0", "router-0", "orchestrator")
    now = {name: report.pid for name, report in job.heartbeat(0).processes.items()}
    assert now == {name: pid for name, pid in pids.items() if name in now}, "what was not concerned was restarted"

    job.finish()
    end = job.run.attempt(1).end()
    assert end is not None and end.outcome == "completed"
    assert [attempt.number for attempt in job.run.attempts()] == [1]
    bad = BadNodeLedger(job.run.path.parent).entries(time.time())
    assert {entry.node for entry in bad} == {first, second}
    conf = str(cluster.spec.slurm_conf)
    assert avoid_bad_nodes(job.plan, conf).job.avoid == (), "all four nodes are needed, once these two are back"
    group = job.plan.groups[0].model_copy(update={"nodes": 2, "spares": 0})
    replanned = partial(avoid_bad_nodes, job.plan.model_copy(update={"groups": (group,)}), conf)
    job.wait(lambda: set(replanned().job.avoid) == {first, second})  # once Slurm has enough nodes that respond
    again = replanned()
    assert [finding.fix for finding in again.findings] == [f"primeslurm nodes --forget {e.node}" for e in bad]
    assert f"--exclude={','.join(again.job.avoid)}" in render(again)


def test_node_that_fails_preflight_is_excluded(cluster: Cluster, start: Callable[..., Job]) -> None:
    bad = cluster.spec.gpu_names[1]
    job = start(replicas=1, spares=1, without_address=bad)
    job.wait_for("engine-r0-0", "router-0")
    assert job.node_of(1) != bad
    (lost,) = job.events(NodeLost)
    assert lost.node == bad and "does not resolve" in lost.reason
    job.wait(lambda: len(job.events(PreflightDone)) == 3)  # an excluded node still runs the remaining checks
    checked = {event.node: event.fitness for event in job.events(PreflightDone)}
    assert checked[bad] == "unfit" and sorted(checked.values()) == ["fit", "fit", "unfit"]
    job.finish()


@pytest.mark.campaign
@pytest.mark.parametrize(("replicas", "spares"), [pytest.param(1, 1, id="spare"), pytest.param(2, 0, id="no-spare")])
def test_a_node_where_no_agent_can_be_started(
    replicas: int, spares: int, cluster: Cluster, start: Callable[..., Job], tmp_path: Path
) -> None:
    """Its slurmd dies before the job's step begins, and Slurm does not know yet."""
    lost = cluster.spec.gpu_names[1]
    first_start = f"touch {tmp_path}/began; until [ -e {tmp_path}/crashed ]; do sleep 0.1; done"
    job = start(replicas=replicas, spares=spares, prologue=first_start)
    job.wait((tmp_path / "began").exists)
    next(daemon for daemon in cluster.daemons if daemon.name == lost).send(signal.SIGKILL)
    (tmp_path / "crashed").touch()
    if spares:
        job.wait(lambda: job.events(LaunchedAgain))
        kill_node(cluster, lost)  # Slurm notices, and the job continues
    else:
        job.wait(lambda: job.attempt.end())
        end = job.attempt.end()
        assert end is not None and (end.outcome, end.suspect, end.requeued) == ("failed", lost, True)
        kill_node(cluster, lost)  # otherwise it would start again only after SlurmdTimeout
        job.wait(lambda: job.attempt.number == 2)
    job.wait_for(*(process.name for process in job.plan.processes()))
    assert lost not in [agent.name for agent in job.attempt.assignment().agents.values()]
    job.finish()
    last = job.attempt.end()
    assert last is not None and last.outcome == "completed"
    assert [attempt.number for attempt in job.run.attempts()] == ([1] if spares else [1, 2])
    assert {entry.node for entry in BadNodeLedger(job.run.path.parent).entries(time.time())} == {lost}
    diagnosis = diagnose(job.run, job.run.attempt(1), lambda _: None)
    failure = diagnosis.recovered[0] if spares else diagnosis.first and diagnosis.first.failure
    assert failure is not None and (failure.component, failure.node) == (f"node {lost}", lost)


def test_a_node_where_the_agent_ends_at_once(cluster: Cluster, start: Callable[..., Job], tmp_path: Path) -> None:
    """The head does not wait for it: srun reports it in the job's output while the head is running."""
    bad = cluster.spec.gpu_names[1]
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" != {bad} ] || {{ sleep 3; exit 127; }}\nexec "$@"\n')
    launcher.chmod(0o755)
    job = start(replicas=1, spares=1, launcher=(str(launcher),))
    job.wait_for("engine-r0-0", "router-0")
    (lost,) = job.events(NodeLost)
    assert lost.node == bad and lost.reason == "no agent could be started: Exited with exit code 127"
    assert job.node_of(1) != bad
    job.finish()


@pytest.mark.campaign
def test_another_agent_requeues_a_job_without_a_head(cluster: Cluster, start: Callable[..., Job]) -> None:
    """With --no-kill, Slurm itself would leave such a job alone until its time limit."""
    job = start(replicas=1, spares=0)
    job.wait_for("engine-r0-0", "router-0", "orchestrator")
    head = job.node_of(0)
    kill_node(cluster, head)
    job.wait(lambda: job.attempt.number == 2)
    end = job.run.attempt(1).end()
    assert end is not None and (end.outcome, end.suspect, end.requeued) == ("failed", "head", True)
    job.wait_for("engine-r0-0", "router-0", "orchestrator")
    assert job.node_of(0) != head
    assert head not in [agent.name for agent in job.attempt.assignment().agents.values()]
    job.finish()
    last = job.run.attempt(2).end()
    assert last is not None and last.outcome == "completed"


@pytest.mark.parametrize("victim", ["head", pytest.param("trainer", marks=pytest.mark.campaign)])
def test_attempt_is_requeued_after_the_controller_returns(
    victim: str, cluster: Cluster, start: Callable[..., Job]
) -> None:
    """The controller is away for longer than Slurm's commands retry. The agent retries until it is back."""
    job = start(replicas=1, spares=0)
    job.wait_for("engine-r0-0", "router-0", "orchestrator", "trainer-rank-0")
    head = job.heartbeat(0)
    pid = head.agent_pid if victim == "head" else head.processes["trainer-rank-0"].pid
    assert pid is not None
    kill_controller(cluster)
    try:
        os.kill(pid, signal.SIGKILL)
        job.wait(lambda: "controller does not answer" in job.run.job_output(job.id).read_text())
        assert (end := job.run.attempt(1).end()) is not None and (end.outcome, end.requeued) == ("failed", True)
    finally:
        revive_controller(cluster)
    job.wait(lambda: job.attempt.number == 2)
    job.wait_for("engine-r0-0", "router-0", "orchestrator", "trainer-rank-0")
    job.finish()
    last = job.run.attempt(2).end()
    assert last is not None and last.outcome == "completed"


@pytest.mark.campaign
def test_requeue_is_repeated_if_the_controller_lost_it(cluster: Cluster, start: Callable[..., Job]) -> None:
    """The controller dies before the requeue is on its disk, and comes back with a running job."""
    job = start(replicas=1, spares=0)
    job.wait_for("engine-r0-0", "router-0", "orchestrator", "trainer-rank-0")
    log = cluster.spec.directory / "log/slurmctld.log"
    pid = job.heartbeat(0).processes["trainer-rank-0"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    requeued = re.compile(rf"Requeuing JobId={job.id}\b")
    job.wait(lambda: requeued.search(log.read_text()))
    kill_controller(cluster)
    revive_controller(cluster)
    job.wait(lambda: job.attempt.number == 2)
    assert not re.search(rf"Batch JobId={job.id} missing", log.read_text()), "it found out by itself, minutes later"
    job.wait_for("engine-r0-0", "router-0", "orchestrator", "trainer-rank-0")
    job.finish()
    last = job.run.attempt(2).end()
    assert last is not None and last.outcome == "completed"


def test_job_avoids_only_as_many_nodes_as_can_be_spared(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes of the partition have failed. A job that needs two nodes is kept away only from the two latest."""
    conf = str(cluster.spec.slurm_conf)
    monkeypatch.setenv("SLURM_CONF", conf)
    site = Site.model_validate(yaml.safe_load(cluster.spec.site_file.read_text()))
    plan = make_plan(tmp_path / "runs" / "toy", site, replicas=1, spares=0)
    Path(plan.run_dir).mkdir(parents=True)
    ledger = BadNodeLedger(tmp_path / "runs")
    names = list(cluster.client.nodes_of("gpu"))
    for age, name in enumerate(names):
        ledger.record(name, "silent", "other", 1, now=time.time() - age, hours=1)
    assert avoid_bad_nodes(plan, conf).job.avoid == tuple(names[: len(names) - 2])
    argv = ("sbatch", "--parsable", "--hold", "--partition=gpu", "--nodes=2", "--output=/dev/null", "--wrap=true")
    job_id = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    def excluded_nodes() -> str:
        shown = subprocess.run(("scontrol", "show", "job", job_id), check=True, capture_output=True, text=True).stdout
        (value,) = re.findall(r"ExcNodeList=(\S*)", shown)
        return str(value)

    try:
        exclude_bad_nodes(plan, job_id)
        assert expand(excluded_nodes()) == names[: len(names) - 2]
        assert [entry.node for entry in excluded(Path(plan.run_dir))] == names[: len(names) - 2]
        for name in names:
            ledger.forget(name)
        exclude_bad_nodes(plan, job_id)
        assert excluded_nodes() == "(null)" and excluded(Path(plan.run_dir)) == []
    finally:
        cluster.client.cancel(job_id)

"""Agents and head with real processes: start order, restarts, endings and clean-up."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from primeslurm.base.files import read_json, write_atomic
from primeslurm.node.agent.node_agent import AgentTimings, NodeAgent
from primeslurm.node.head.exporter import TARGETS_FILE, TOKEN_FILE
from primeslurm.node.head.head import Head, HeadTimings
from primeslurm.node.head.job_end import Termination
from primeslurm.node.host.exit_cleanup import ExitCleanup
from primeslurm.plan.model import Plan, Process, Replica
from primeslurm.plan.supervision import Health
from primeslurm.records.events.nodes import FileSystemFault
from primeslurm.records.events.processes import ProcessExited, ProcessStarted
from primeslurm.records.fleet import AgentReport, Ending, Outcome, PreflightState, ProcessReport
from primeslurm.records.journal import Journal
from primeslurm.records.reading import read_record
from primeslurm.records.record import Event
from primeslurm.records.state import TrainerState
from primeslurm.run.directory import BY_SIGTERM, CANCEL_NOW, Attempt, RunDirectory
from primeslurm.run.history import events as all_events
from primeslurm.wire import exit_codes
from primeslurm.wire.transport import secret
from tests.support.plans import SERVER, plan_of, process, python
from tests.support.waiting import wait_until

E = TypeVar("E", bound=Event)
T = TypeVar("T")
IGNORES_TERM = python("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
# A trainer that checkpoints on SIGUSR1 and exits as trainers do.
TRAINER = python(
    "import signal, sys, time\n"
    f"signal.signal(signal.SIGUSR1, lambda *a: (open(sys.argv[1], 'w').close(), sys.exit({exit_codes.CHECKPOINTED})))\n"
    "open(sys.argv[2], 'w').close(); time.sleep(600)",
    "${attempt_dir}/checkpointed",
    "${attempt_dir}/listens",
)


QUICK = AgentTimings(tick_s=0.1, term_grace_s=1.0)
PATIENT = HeadTimings(period_s=0.1)


class Running:
    """A plan that one thread per node runs, as submitit's processes would."""

    def __init__(self, plan: Plan, monkeypatch: pytest.MonkeyPatch, agents: AgentTimings, head: HeadTimings) -> None:
        self.run = RunDirectory(Path(plan.run_dir))
        self.attempt: Attempt = self.run.attempt(1)
        self.attempt.prepare(plan)
        for module in ("agent.node_agent", "preflight.preflight"):
            monkeypatch.setattr(f"primeslurm.node.{module}.own_address", lambda *_: "127.0.0.1")
        self.agents = [
            NodeAgent(plan, rank, self.attempt, "test-id", plan.python, agents) for rank in range(plan.allocated)
        ]
        for agent in self.agents:
            agent.address = f"127.0.0.{agent.rank + 1}"
        self.head = Head(self.agents[0], self.run, head)
        self.threads = [threading.Thread(target=agent.run, daemon=True) for agent in self.agents]
        for thread in [*self.threads, self.head]:
            thread.start()

    def report(self, name: str) -> ProcessReport:
        """Return the newest report of a process. Without a report it is waiting."""
        node = self.attempt.plan().process(name).node
        heartbeat = self.attempt.heartbeat(node, self.attempt.assignment())
        return (heartbeat.processes.get(name) if heartbeat else None) or ProcessReport("waiting")

    def wait(self, condition: Callable[[], T | None]) -> T:
        return wait_until(condition, poll_s=0.05)

    def wait_state(self, name: str, state: str) -> ProcessReport:
        self.wait(lambda: self.report(name).state == state)
        return self.report(name)

    def wait_silent(self, rank: int, condition: Callable[[], T | None]) -> T:
        """Wait for a condition, while the head believes that an agent has been silent for longer than its timeout."""

        def silent() -> T | None:
            self.head.fleet.seen_at[rank] = time.monotonic() - 2 * self.head.plan.node_silent_s
            return condition()

        return self.wait(silent)

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in all_events(self.run) if isinstance(event, kind)]

    def ended(self) -> Ending:
        """Wait for the end of the attempt, and return how it ended."""
        self.join()
        assert self.head.ending is not None
        return self.head.ending

    def join(self) -> None:
        for thread in [*self.threads, self.head]:
            thread.join(600)
            assert not thread.is_alive()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def run(
        *nodes: tuple[Process, ...], agents: AgentTimings = QUICK, head: HeadTimings = PATIENT, **options: Any
    ) -> Running:
        started.append(Running(plan_of(tmp_path / "run", *nodes, **options), monkeypatch, agents, head))
        return started[-1]

    yield run
    for running in started:
        running.head.end(Ending(Outcome.CANCELLED, "test over"))
        running.join()


def alive(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_starts_after_its_prerequisites_answer(start: Callable[..., Running]) -> None:
    server = process(
        "server",
        1,
        python(SERVER, "${host}", "${port:http}"),
        ports={"http": 21000},
        health=Health(port="http", path="/x"),
    )
    client = process("client", 0, python("import sys; print(sys.argv[1])", "${addr:server:http}"), after=("server",))
    running = start((client,), (server,))
    running.wait_state("client", "done")
    log = (running.attempt.path / "logs/engine/client.log").read_text().splitlines()
    port = read_json(running.attempt.agent_file(1))["ports"]["server"]["http"]
    assert log[-1] == f"127.0.0.2:{port}"
    assert running.report("server").healthy is True


def test_prometheus_can_scrape_head_and_engines_until_the_attempt_ends(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    secret.create(tmp_path / "run")
    engine = process("engine-r0-0", 1, python(SERVER, "${host}", "${port:http}"), ports={"http": 21000})
    running = start((process("orchestrator", 0),), (engine,))
    targets_file = running.run.path / TARGETS_FILE
    running.wait(lambda: len(read_json(targets_file) or ()) == 2)
    head, of_engine = (target["targets"][0] for target in read_json(targets_file))
    assert of_engine == f"127.0.0.2:{read_json(running.attempt.agent_file(1))['ports']['engine-r0-0']['http']}"
    token = (running.run.path / TOKEN_FILE).read_text()
    request = urllib.request.Request(f"http://{head}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        assert f'primeslurm_attempt{{run="{running.run.name}"}} 1.0' in answer.read().decode()
    running.head.end(Ending(Outcome.CANCELLED, "test over"))
    running.join()
    assert read_json(targets_file) == []
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(request, timeout=30)


def test_an_attempt_ends_when_a_newer_one_owns_the_run(start: Callable[..., Running]) -> None:
    running = start((process("orchestrator", 0),))
    pid = running.wait_state("orchestrator", "ready").pid
    (running.run.path / "attempts" / "2").mkdir()
    assert running.ended() == Ending(Outcome.CANCELLED, "attempt 2 has taken over the run")
    assert not alive(pid) and not running.head.conclude()
    assert (end := running.attempt.end()) is not None and not end.requeued


def test_the_head_publishes_news_at_once_and_repeats_it_each_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primeslurm.node.agent.node_agent.own_address", lambda *_: "127.0.0.1")
    plan = plan_of(tmp_path / "run", (process("p", 0),))
    run = RunDirectory(Path(plan.run_dir))
    run.attempt(1).prepare(plan)
    head, now = Head(NodeAgent(plan, 0, run.attempt(1), "id", plan.python), run), time.monotonic()
    said = []
    for after in (0.0, 0.5, 1.0, 1.5, 1.75):
        if after == 1.75:
            head.end(Ending(Outcome.CANCELLED, "test over"))
        head.wall = partial(float, after)
        head.tick(now + after)
        view = run.attempt(1).fleet()
        assert view is not None and (view.ending is not None) is (after == 1.75)
        said.append(view.time)
    assert said == [0.0, 0.0, 1.0, 1.0, 1.75]


def test_a_killed_engine_is_restarted_in_place_on_its_port(start: Callable[..., Running]) -> None:
    argv = python(SERVER, "${host}", "${port:http}")
    server = process("server", 0, argv, ports={"http": 21000}, health=Health(port="http", path="/x"))
    running = start((server,))
    first = running.wait_state("server", "ready")
    os.kill(int(str(first.pid)), signal.SIGKILL)
    running.wait(lambda: running.report("server").restarts == 1)
    second = running.wait_state("server", "ready")
    assert second.pid != first.pid
    assert running.head.ending is None


def test_shared_memory_of_a_killed_engine_is_freed(start: Callable[..., Running], tmp_path: Path) -> None:
    name = Path(f"/dev/shm/primeslurm-test-{tmp_path.name}-{os.getpid()}")
    worker = python(
        "import mmap, os, sys, time\n"
        "if os.fork(): time.sleep(600)\n"  # The engine. Its worker maps the memory.
        "file = open(f'{sys.argv[1]}-{os.getpid()}', 'w+b'); file.truncate(4096)\n"
        "mapped = mmap.mmap(file.fileno(), 0)\n"
        "open(f'{sys.argv[2]}-{os.getpid()}', 'w').close(); time.sleep(600)",
        str(name),
        str(tmp_path / "mapped"),
    )
    running = start([process("engine-0", 0, worker)])
    running.wait(lambda: list(tmp_path.glob("mapped-*")))
    [first] = name.parent.glob(name.name + "-*")
    os.kill(int(str(running.wait_state("engine-0", "ready").pid)), signal.SIGKILL)
    running.wait(lambda: not first.exists())
    running.wait(lambda: len(list(tmp_path.glob("mapped-*"))) == 2)
    assert len(list(name.parent.glob(name.name + "-*"))) == 1
    running.agents[0].end(Ending(Outcome.CANCELLED, "test", "test"))
    running.join()
    assert list(name.parent.glob(name.name + "-*")) == []


def test_the_error_of_a_process_is_in_the_reason(start: Callable[..., Running]) -> None:
    bad = python("print('INFO: up', flush=True); raise RuntimeError('no room ' + 300 * '.')")
    running = start((process("bad", 0, bad, max_restarts=0),))
    ending = running.ended()
    error = f"RuntimeError: no room {300 * '.'}"
    assert ending.reason == f"bad ended with exit code 1 ({error[:197]}...)"
    assert running.events(ProcessExited)[0].reason == f"{error[:197]}..."


def test_a_dead_trainer_ends_the_attempt_everywhere(start: Callable[..., Running]) -> None:
    trainer = process("trainer-rank-0", 1, role="trainer")
    running = start((process("orchestrator", 0, IGNORES_TERM, role="orchestrator"),), (trainer,))
    other = running.wait_state("orchestrator", "ready").pid
    os.kill(int(str(running.wait_state("trainer-rank-0", "ready").pid)), signal.SIGKILL)
    assert running.ended() == Ending(Outcome.FAILED, "trainer-rank-0 was ended by signal 9", "trainer-rank-0")
    assert not alive(other)


def trained(running: Running, steps: int) -> None:
    """Record that the trainer has trained some steps."""
    Journal(running.attempt.path, "trainer-rank-0").state(TrainerState(steps, "train"))


def start_training(start: Callable[..., Running], steps: int) -> Running:
    trainer = process("trainer-rank-0", 1, TRAINER, role="trainer")
    running = start((process("orchestrator", 0, role="orchestrator"),), (trainer,))
    running.wait_state("orchestrator", "ready")
    running.wait_state("trainer-rank-0", "ready")
    running.wait((running.attempt.path / "listens").exists)
    running.wait(lambda: running.head._all_run("trainer") and running.head._all_run("orchestrator"))  # the head knows
    trained(running, steps)
    return running


def test_preemption_lets_trainers_checkpoint_first(start: Callable[..., Running]) -> None:
    running = start_training(start, steps=3)
    running.head.end(Ending(Outcome.PREEMPTED, "USR2"))
    running.join()
    assert (running.attempt.path / "checkpointed").exists()
    assert running.report("trainer-rank-0").exit_code == exit_codes.CHECKPOINTED
    assert running.head.conclude() is True


def test_sigterm_to_every_process_lets_trainers_checkpoint_first(start: Callable[..., Running]) -> None:
    """scancel may signal all processes of a step. Trainer and orchestrator must survive that."""
    running = start_training(start, steps=3)
    pids = [int(str(running.report(name).pid)) for name in ("trainer-rank-0", "orchestrator")]
    for pid in pids:
        os.killpg(pid, signal.SIGTERM)
    for agent in (running.head, *running.agents):
        agent.terminate()
    assert running.ended() == Ending(Outcome.CANCELLED, BY_SIGTERM)
    assert running.report("trainer-rank-0").exit_code == exit_codes.CHECKPOINTED
    assert (running.attempt.path / "checkpointed").exists()
    assert running.head.conclude() is False
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("steps", "words", "checkpoints"), [(3, "", True), (3, CANCEL_NOW, False)], ids=["steps to save", "now"]
)
def test_a_cancel_saves_what_was_trained(
    start: Callable[..., Running], steps: int, words: str, checkpoints: bool
) -> None:
    running = start_training(start, steps)
    pids = [running.report(name).pid for name in ("trainer-rank-0", "orchestrator")]
    write_atomic(running.attempt.cancel_file, words)
    assert running.ended() == Ending(Outcome.CANCELLED, "cancelled by the user")
    assert (running.attempt.path / "checkpointed").exists() is checkpoints
    assert not any(map(alive, pids))


def test_an_agent_that_alone_gets_sigterm_waits_for_the_head_first(
    assigned: tuple[Head, list[NodeAgent], float],
) -> None:
    head, agents, now = assigned
    agents[1].terminate()
    for seconds in (1, 5, 11):
        head.tick(now + seconds)
        agents[1].tick(now + seconds)
        assert agents[1].ending is None
    agents[1].tick(now + 12)
    assert agents[1].ending == Ending(Outcome.CANCELLED, BY_SIGTERM)


def test_the_head_stops_waiting_before_slurm_kills_it(
    assigned: tuple[Head, list[NodeAgent], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _, now = assigned
    found = Termination(Ending(Outcome.PREEMPTED, "preempted"), left_s=60.0)
    monkeypatch.setattr(head, "_why_terminated", lambda: found)
    monkeypatch.setattr(head, "_all_run", lambda role, none=False: True)
    head.terminate()
    head.tick(now + 1)
    assert head.ending == found.ending
    for seconds, release, gathered in [(2, False, False), (50, False, False), (52, True, False), (59, True, True)]:
        head.fleet.seen_at |= dict.fromkeys(head.fleet.agents, now + seconds)
        assert (head._release(now + seconds), head._gathered(now + seconds)) == (release, gathered)


def test_a_failure_that_would_repeat_itself_ends_at_once_if_nothing_was_trained(
    assigned: tuple[Head, list[NodeAgent], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _, now = assigned
    monkeypatch.setattr(head, "_all_run", lambda role, none=False: True)
    for final in (True, False):
        head.ending, head._ending_at = Ending(Outcome.FAILED, "environments do not load", final=final), now
        assert head._release(now) is final


@pytest.mark.parametrize(("known", "outcome"), [(True, "cancelled"), (False, "preempted")])
def test_a_run_cancelled_in_its_grace_time_is_not_requeued(
    assigned: tuple[Head, list[NodeAgent], float], monkeypatch: pytest.MonkeyPatch, known: bool, outcome: str
) -> None:
    head, _, now = assigned
    preempted = Termination(Ending(Outcome.PREEMPTED, "preempted"), left_s=60.0)
    cancelled = Termination(Ending(Outcome.CANCELLED, BY_SIGTERM), left_s=30.0, known=known)
    whys = iter([preempted, cancelled])
    monkeypatch.setattr(head, "_why_terminated", lambda: next(whys))
    for seconds in (1, 2):
        head.terminate()
        head.tick(now + seconds)
    assert head.ending is not None and head.ending.outcome == outcome
    assert head.conclude() is (outcome == "preempted")


def test_processes_ignore_the_signal_before_a_time_limit(start: Callable[..., Running]) -> None:
    running = start((process("engine", 0),))
    status = Path(f"/proc/{running.wait_state('engine', 'ready').pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert ignored >> (signal.SIGUSR2 - 1) & 1


def test_completion_ends_servers_and_removes_directories(start: Callable[..., Running]) -> None:
    done = python("pass")
    running = start(
        (process("orchestrator", 0, done, role="orchestrator"),),
        (process("trainer-rank-0", 1, done, role="trainer"), process("engine", 1)),
    )
    assert running.ended().outcome is Outcome.COMPLETED
    assert running.head.conclude() is False
    assert not any(agent.tmp.exists() for agent in running.agents)
    assert all(agent.processes is not None and not agent.processes.children for agent in running.agents)


def test_a_program_that_does_not_exist_is_reported(start: Callable[..., Running]) -> None:
    running = start((process("bad", 0, ("/no/such/program",), max_restarts=0),))
    ending = running.ended()
    assert "No such file" in ending.reason


def test_an_error_of_the_head_ends_the_attempt(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(Head, "_publish_addresses", broken)
    running = start((process("engine", 0),))
    ending = running.ended()
    assert ending.reason == "head: PermissionError: [Errno 13] Permission denied"


def test_the_head_may_start_as_late_as_any_node(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", (), (process("b", 1),), node_silent_s=1, node_start_s=400)
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    attempt.prepare(plan)
    agent, now = NodeAgent(plan, 1, attempt, "test-id", plan.python), time.monotonic()
    for seconds in range(400):
        agent.tick(now + seconds)
        assert agent.ending is None
    agent.tick(now + 401)
    assert agent.ending == Ending(Outcome.FAILED, "the head has been silent for 400 s", "head")


def test_an_agent_reports_news_at_once_and_otherwise_periodically(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", (), node_silent_s=900)
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    attempt.prepare(plan)
    agent, now, told = NodeAgent(plan, 0, attempt, "test-id", plan.python), time.monotonic(), []
    for second in range(24):
        agent.preflight._done = second >= 13
        agent.wall = partial(float, second)
        agent.tick(now + second)
        report = read_record(attempt.agent_file(0), AgentReport)
        assert report is not None and (report.fitness is PreflightState.FIT) == (second >= 13)
        told.append(report.time)
    assert [second for second, at in enumerate(told) if second == at] == [0, 10, 13, 23]


def test_agents_end_when_the_head_is_lost(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    running = start((process("engine", 0),), (process("other", 1),))
    pid = running.wait_state("other", "ready").pid
    monkeypatch.setattr(NodeAgent, "head_timeout_s", 1.0)
    monkeypatch.setattr(Head, "_publish_view", lambda *_: None)
    running.wait(lambda: not alive(pid))
    assert running.agents[1].ending == Ending(Outcome.FAILED, "the head has been silent for 1 s", "head")


@pytest.fixture
def assigned(tmp_path: Path) -> tuple[Head, list[NodeAgent], float]:
    """A head, its agents, and the time of their last heartbeat. The test makes them tick."""
    plan = plan_of(tmp_path / "run", (process("a", 0),), (process("b", 1),), node_silent_s=90)
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    attempt.prepare(plan)
    agents = [NodeAgent(plan, rank, attempt, "test-id", plan.python) for rank in (0, 1)]
    head, now = Head(agents[0], RunDirectory(tmp_path / "run")), time.monotonic()
    for agent in agents:
        agent.preflight._done = True
        agent._heartbeat(now, ended=False)
    head.tick(now)
    assert head.fleet.assignment.generation
    return head, agents, now


def test_a_process_that_did_not_run_blames_nobody(assigned: tuple[Head, list[NodeAgent], float]) -> None:
    """After a suspension, any process of the machine may run first."""
    head, agents, now = assigned
    agents[1]._read_head(now)
    for seconds in range(1000, 1080):
        head.tick(now + seconds)
        assert head.ending is None
    agents[1].tick(now + 1000)
    assert agents[1].ending is None
    for seconds in range(1080, 1100):
        head.tick(now + seconds)
    assert head.ending is not None and "silent for 91 s" in head.ending.reason


def test_a_full_disk_excuses_missing_heartbeats(
    assigned: tuple[Head, list[NodeAgent], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, agents, now = assigned
    agents[1]._read_head(now)
    heartbeat = agents[0].attempt.agent_file(0).read_text()

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module in ("agent.node_agent", "head.head"):
        monkeypatch.setattr(f"primeslurm.node.{module}.write_json", full)
    for seconds in range(1, 850):
        agents[1].tick(now + seconds)
        head.tick(now + seconds)
        assert (agents[1].ending, head.ending) == (None, None), seconds
    assert head.fleet.gone == {} and agents[0].attempt.agent_file(0).read_text() == heartbeat
    assert [type(event) for event in all_events(head.run_directory)].count(FileSystemFault) == 1
    monkeypatch.undo()
    for seconds in range(850, 860):
        agents[0]._heartbeat(now + seconds, ended=False)
        agents[1].tick(now + seconds)
        head.tick(now + seconds)
    assert (agents[1].ending, head.ending, head.fleet.gone) == (None, None, {})
    assert [event.what for event in all_events(head.run_directory) if isinstance(event, FileSystemFault)][-1] == ""


def test_a_full_disk_excuses_for_a_limited_time(
    assigned: tuple[Head, list[NodeAgent], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, agents, now = assigned
    agents[1]._read_head(now)
    head.run_directory.path.joinpath(".reserve").write_bytes(b"")
    monkeypatch.setattr("primeslurm.node.host.record_writer.fill_reserve", lambda _: False)
    patience = int(1.5 * agents[1].plan.stall_timeout_s)
    for seconds in range(1, patience):
        agents[1].tick(now + seconds)
        assert agents[1].ending is None
    for seconds in range(patience, patience + 200):
        agents[1].tick(now + seconds)
    assert agents[1].ending is not None and "silent for 180 s" in agents[1].ending.reason


def test_a_cancelled_job_is_not_requeued_if_the_head_hears_of_it_last(
    assigned: tuple[Head, list[NodeAgent], float],
) -> None:
    head, agents, now = assigned
    agents[1]._heartbeat(now + 1, ended=True)
    head.tick(now + 1)
    assert head.ending is not None and head.ending.reason.endswith("its agent ended")
    head.end(Ending(Outcome.CANCELLED, BY_SIGTERM))
    assert head.conclude() is False
    end = head.attempt.end()
    assert end is not None and (end.outcome, end.reason) == ("cancelled", BY_SIGTERM)


def server(name: str, node: int, port: int, *uses: str, **options: object) -> Process:
    argv = python(SERVER, "${host}", "${port:http}", *(f"${{addr:{other}:http}}" for other in uses))
    options = {"ports": {"http": port}, "health": Health(port="http", path="/x"), **options}
    return process(name, node, argv, **options)


def test_a_spare_takes_over_and_dependent_processes_restart(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost agent still runs. It ends its processes, and is not used again."""
    running = start(
        (server("router", 0, 21000, "engine", after=("engine",), role="router"), server("other", 0, 21010)),
        (server("engine", 1, 21020),),
        spares=1,
    )
    before = {name: running.wait_state(name, "ready").pid for name in ("router", "engine", "other")}
    running.wait(lambda: 2 in running.head.fleet._fit())
    lost = running.agents[1]
    heartbeat = lost._heartbeat
    monkeypatch.setattr(lost, "_heartbeat", lambda *_, **__: None)
    running.wait_silent(1, lambda: running.attempt.assignment().agents[1].rank == 2)
    monkeypatch.setattr(lost, "_heartbeat", heartbeat)
    running.wait(lambda: not running.threads[1].is_alive())
    assert not alive(before["engine"])
    running.wait(lambda: running.report("router").pid not in (before["router"], None))
    after = {name: running.wait_state(name, "ready").pid for name in ("router", "engine", "other")}
    assert after["other"] == before["other"] and after["engine"] != before["engine"]
    assert running.report("router").restarts == 0
    assert [e.process for e in running.events(ProcessStarted) if e.name == "engine"] == ["agent-1", "agent-2"]
    assert running.head.ending is None


def test_a_trainer_continues_without_a_lost_engine(start: Callable[..., Running]) -> None:
    """Engines that share its GPUs matter only at its start, until they have measured the free memory."""
    engines = ("engine-0", "engine-1")
    running = start(
        (
            server("engine-0", 0, 21000),
            server("engine-1", 0, 21010, max_restarts=0),
            server("router", 0, 21020, role="router", after=engines),
            process("trainer-rank-0", 0, role="trainer", after=engines),
        ),
        replicas=(Replica(index=0, router="router", engines=engines, nodes=(0,)),),
    )
    before = {name: running.wait_state(name, "ready").pid for name in ("engine-1", "router", "trainer-rank-0")}
    started = [event.name for event in running.events(ProcessStarted)]
    assert started.index("trainer-rank-0") > max(map(started.index, engines))
    os.kill(int(str(before["engine-1"])), signal.SIGKILL)
    running.wait(lambda: running.report("router").pid not in (before["router"], None))
    assert running.report("trainer-rank-0").pid == before["trainer-rank-0"]
    assert running.head.ending is None


def test_the_end_does_not_wait_for_a_silent_node(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = HeadTimings(gather_heartbeats=0.3, gather_s=3600.0)
    running = start((process("a", 0),), (process("b", 1),), head=timings, node_silent_s=600)
    running.wait(lambda: running.head.fleet.assembled)
    monkeypatch.setattr(running.agents[1], "_heartbeat", lambda *_, **__: None)
    running.attempt.cancel_file.touch()
    running.join()
    assert not running.head.fleet.agents[1].ended


def test_a_process_gets_its_files_directories_and_variables(
    start: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []
    monkeypatch.setattr(ExitCleanup, "add", lambda _, directory: swept.append(directory))
    disk = tmp_path / "disk" / "run-${run_id}-n${node}"
    code = "import os, sys, time; print(open(sys.argv[1]).read(), 'EMPTY' in os.environ, flush=True); time.sleep(600)"
    reader = process(
        "reader",
        0,
        python(code, "${tmp}/config.json"),
        ports={"http": 21000},
        env={"EMPTY": ""},
        files={"config.json": '{"at": "${addr:reader:http}"}'},
        scratch=[str(disk)],
    )
    left_behind = tmp_path / "disk" / "run-test-id-n0" / "old"
    left_behind.mkdir(parents=True)
    (tmp_path / "disk" / ".run-test-id-n0").mkdir()  # its agent was killed before the directory had its name
    running = start((reader,))
    log = running.attempt.path / "logs/engine/reader.log"
    running.wait(lambda: log.exists() and len(log.read_text().splitlines()) > 1)
    port = read_json(running.attempt.addresses_file)["ports"]["reader"]["http"]
    assert log.read_text().splitlines()[-1] == f'{{"at": "127.0.0.1:{port}"}} False'
    assert left_behind.parent.is_dir() and not left_behind.exists()
    assert left_behind.parent in swept, "it is removed even if the agent is killed"
    running.head.end(Ending(Outcome.CANCELLED, "enough"))
    running.join()
    assert list((tmp_path / "disk").iterdir()) == []

"""Processes that a fork server has forked, which share its imports."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from primeslurm.node.agent import fork_client
from primeslurm.node.agent.child_process import ProcessGroup
from primeslurm.node.agent.fork_client import ForkServer, ForkServers
from primeslurm.plan.model import Process
from primeslurm.records import heartbeats
from primeslurm.testbed.embedded_slurm.daemons import OsProcess
from primeslurm.wire.transport import secret
from tests.support.plans import process
from tests.support.waiting import wait_until
from tests.unit.node.test_agent import Running, start

__all__ = ["start"]  # a fixture
ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.unit.node.forked_program"
ENV = dict(os.environ) | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    """A server that has imported the program."""
    started = ForkServer([PROGRAM], sys.executable, ENV, tmp_path / "server.log", tmp_path)
    wait_until(lambda: started.imported)
    yield started
    started.close()


def forked(server: ForkServer, directory: Path, *args: str, env: dict[str, str] = ENV, **passed: int) -> ProcessGroup:
    return server.fork([sys.executable, "-m", PROGRAM, *args], env, directory / "a.log", directory, passed)


def ended(child: ProcessGroup) -> int:
    wait_until(lambda: child.poll() is not None)
    code = child.poll()
    assert code is not None
    return code


def report_of(server: ForkServer, directory: Path, env: dict[str, str] = ENV, **passed: int) -> dict[str, Any]:
    out = directory / "said.json"
    assert ended(forked(server, directory, "say", str(out), env=env, **passed)) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_a_forked_process_leads_its_own_group(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    env = {**ENV, "A_VARIABLE": "x", "TMPDIR": str(tmp_path / "other")}
    report, again = report_of(server, tmp_path, env), report_of(server, tmp_path, env)
    assert report["session"] == report["pid"] != again["pid"]
    assert report["directory"] == str(tmp_path)
    assert report["words"] == ["say", str(tmp_path / "said.json")]
    assert report["variable"] == "x" and report["temporary"] == str(tmp_path / "other")
    assert report["usr2"] and report["child"]
    assert report["random"] != again["random"]
    log = (tmp_path / "a.log").read_text()
    assert f"{sys.executable} -m {PROGRAM} say" in log and log.count("an error\n") == 2


def test_a_forked_process_does_not_import_again(server: ForkServer, tmp_path: Path) -> None:
    child = forked(server, tmp_path, "wait")
    assert psutil.Process(child.pid).ppid() != os.getpid()
    assert psutil.Process(psutil.Process(child.pid).ppid()).ppid() == os.getpid()
    wait_until(lambda: "fork_server" not in " ".join(psutil.Process(child.pid).cmdline()))
    assert " ".join(psutil.Process(child.pid).cmdline()).strip() == f"{sys.executable} -m {PROGRAM} wait"
    child.kill()
    assert ended(child) == -signal.SIGKILL


def test_a_forked_process_inherits_descriptors(server: ForkServer, tmp_path: Path) -> None:
    env = {name: value for name, value in ENV.items() if name != secret.VARIABLE}
    page = heartbeats.HeartbeatPage("a")
    with secret.handing_over("s3cret") as (descriptor, variables):
        more = {heartbeats.VARIABLE: str(page.descriptor)}
        passed = {secret.HANDED_OVER: descriptor, heartbeats.VARIABLE: page.descriptor}
        child = forked(server, tmp_path, "say", str(tmp_path / "said"), env={**env, **variables, **more}, **passed)
    assert ended(child) == 0
    assert json.loads((tmp_path / "said").read_text())["secret"] == "s3cret"
    assert page.read().number == 1
    page.close()


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_passed_on(code: int, server: ForkServer, tmp_path: Path) -> None:
    assert ended(forked(server, tmp_path, "exit", str(code))) == code


def test_a_forked_process_gets_signals(server: ForkServer, tmp_path: Path) -> None:
    child = forked(server, tmp_path, "wait")
    assert child.poll() is None
    child.send(signal.SIGINT)
    child.terminate()
    assert ended(child) < 0
    child.send(signal.SIGTERM)  # nobody reads it
    child.kill()


def test_a_forked_process_handles_the_signals_that_its_server_ignores(server: ForkServer, tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    child = forked(server, tmp_path, "wait for the end", str(waits))
    wait_until(waits.exists)
    os.kill(server.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert child.poll() is None and not server.failed
    child.terminate()
    assert ended(child) == 7
    assert ended(forked(server, tmp_path, "exit", "3")) == 3


def test_a_forked_process_ends_with_its_server(server: ForkServer, tmp_path: Path) -> None:
    child = forked(server, tmp_path, "wait")
    psutil.Process(psutil.Process(child.pid).ppid()).kill()
    assert ended(child) == -signal.SIGKILL
    wait_until(lambda: OsProcess.of("child", child.pid) is None)
    with pytest.raises(OSError, match=r"Broken pipe|ended|reset"):
        forked(server, tmp_path, "wait")


def test_a_server_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "ANSWER_S", 0.1)
    server = ForkServer([PROGRAM], sys.executable, ENV, tmp_path / "server.log", tmp_path)
    wait_until(lambda: server.imported)
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        forked(server, tmp_path, "wait")
    wait_until(lambda: server.failed)


def test_processes_wait_for_the_imports_of_their_server(tmp_path: Path) -> None:
    servers = ForkServers(tmp_path, tmp_path)
    assert servers.importing((PROGRAM,), sys.executable, ENV)
    wait_until(lambda: not servers.importing((PROGRAM,), sys.executable, ENV))
    first = servers.of((PROGRAM,))
    assert first is not None
    first.close()
    wait_until(lambda: servers.importing((PROGRAM,), sys.executable, ENV))  # another server
    assert servers.of((PROGRAM,)) is not first
    servers.close()


@pytest.mark.parametrize("module", ["no.such.module", "endless"])
def test_processes_import_by_themselves_if_the_server_fails(module: str, tmp_path: Path, monkeypatch: Any) -> None:
    servers, modules = ForkServers(tmp_path, tmp_path), (PROGRAM, module)
    (tmp_path / "endless.py").write_text("import time; time.sleep(3600)\n")
    env = ENV | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    if module == "endless":
        monkeypatch.setattr(fork_client, "IMPORT_S", 0.0)
        assert not servers.importing(modules, sys.executable, env)
    else:
        assert servers.importing(modules, sys.executable, env)
        wait_until(lambda: not servers.importing(modules, sys.executable, env))
        assert "no.such.module" in (tmp_path / f"{PROGRAM}.log").read_text()
    assert servers.of(modules) is None
    assert not servers.importing(modules, sys.executable, env)


def test_a_missing_interpreter_is_no_server(tmp_path: Path) -> None:
    servers = ForkServers(tmp_path, tmp_path)
    assert not servers.importing((PROGRAM,), "/no/python", ENV)
    assert servers.of((PROGRAM,)) is None


def waiting(name: str, node: int, *imports: str) -> Process:
    argv = ("${python}", "-m", PROGRAM, "wait")
    return process(name, node, argv, imports=imports, env={"PYTHONPATH": str(ROOT)}, role="environment")


def test_an_agent_forks_processes_with_the_same_imports(start: Callable[..., Running]) -> None:
    running = start((waiting("a", 0, PROGRAM), waiting("b", 0, PROGRAM), waiting("c", 0)), (waiting("d", 1, PROGRAM),))
    running.wait(lambda: all(running.report(name).state == "ready" for name in "abcd"))
    starters = [psutil.Process(running.report(name).pid).ppid() for name in "abcd"]
    assert starters[0] == starters[1] != os.getpid() and starters[2] == starters[3] == os.getpid()
    server = psutil.Process(starters[0])
    first = running.report("a").pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    running.wait(lambda: running.report("a").restarts == 1 and running.report("a").state == "ready")
    assert psutil.Process(running.report("a").pid).ppid() == server.pid
    server.kill()  # with all forked processes
    running.wait(lambda: all(running.report(name).restarts > 0 and running.report(name).pid for name in "ab"))
    assert psutil.Process(running.report("b").pid).ppid() not in (server.pid, os.getpid())


def test_a_failing_import_is_in_the_log_of_the_process(start: Callable[..., Running]) -> None:
    running = start((waiting("a", 0, PROGRAM, "no.such.module"), waiting("b", 0, PROGRAM, "no.such.module")))
    running.wait(lambda: running.report("a").state == "ready")
    assert psutil.Process(running.report("a").pid).ppid() == os.getpid()


@pytest.mark.parametrize(
    "value", ["x" * 300_000, "caf\udce9", "日本 \x01"], ids=["larger than a message", "not UTF-8", "control characters"]
)
def test_any_environment_reaches_a_forked_process(server: ForkServer, tmp_path: Path, value: str) -> None:
    report = report_of(server, tmp_path, {**ENV, "A_VARIABLE": value})
    assert report["variable"] == value
    assert report_of(server, tmp_path, {**ENV, "A_VARIABLE": "y"})["variable"] == "y"

"""Start of the dashboard: its address, its tunnel, and what is wrong with its arguments."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.support.ports import free_port
from primeslurm.api.dashboard import dashboard
from primeslurm.api.jobs import looking_query
from primeslurm.base.errors import ClusterError, UsageError
from primeslurm.dashboard import server
from primeslurm.dashboard.job_states import ACTIVE_S, ENDED_S, JobStates
from primeslurm.records.attempt import JobRecord
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.run_status import NO_ANSWER
from tests.support.cli import ROOT
from tests.support.clock import Clock
from tests.support.recorded_runs import recorded_run


def test_the_address_has_the_token_and_the_tunnel_leads_to_it(runs: Path) -> None:
    one, other = dashboard(runs), dashboard(runs)
    try:
        assert {one.port, other.port} <= set(range(server.PORT, server.PORT + server.TRIES)) and one.port != other.port
        assert one.url == f"http://127.0.0.1:{one.port}/?token={one.token}"
        assert len(one.token) >= 32 and one.token != other.token
        assert one.tunnel.startswith(f"ssh -N -L {one.port}:127.0.0.1:{one.port} ")
    finally:
        one.listener.close()
        other.listener.close()


def test_other_computers_use_the_hosts_name(runs: Path) -> None:
    served = dashboard(runs, host="0.0.0.0")
    served.listener.close()
    assert served.tunnel == "" and served.url.startswith(f"http://{socket.getfqdn()}:{served.port}/?token=")


@pytest.mark.parametrize("where", ["none", "r", "file"])
def test_what_is_no_directory_of_runs_is_refused(runs: Path, where: str) -> None:
    (runs / "file").write_text("")
    with pytest.raises(UsageError) as error:
        dashboard(runs / where)
    assert error.value.violations[0].field == "RUNS_DIR" and str(runs / where) in str(error.value)


def test_a_wrong_directory_and_a_wrong_host_are_two_problems(runs: Path) -> None:
    with pytest.raises(UsageError) as error:
        dashboard(runs / "none", host="a..b")
    assert [violation.field for violation in error.value.violations] == ["RUNS_DIR", "--host"]


def test_a_port_in_use_and_a_host_of_another_machine_are_refused(runs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"--port = .*cannot listen on 127.0.0.1, port .*in use"):
            dashboard(runs, port=taken.getsockname()[1])
    with pytest.raises(UsageError, match=r"--host = 192.0.2.1: cannot listen"):
        dashboard(runs, host="192.0.2.1")
    with pytest.raises(UsageError, match=r"--host = no.such.host.invalid: has no address"):
        dashboard(runs, host="no.such.host.invalid")
    for host in ("a..b", "x" * 300):
        with pytest.raises(UsageError, match=r"--host = .*: has no address: it is no host name"):
            dashboard(runs, host=host)


@pytest.fixture
def command(runs: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "primeslurm", "dashboard", str(runs), "--port", str(free_port())]
    env = {**os.environ, "PYTHONPATH": ROOT}
    with subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_the_command_serves_until_it_is_interrupted(command: subprocess.Popen[str]) -> None:
    assert command.stdout is not None and command.stderr is not None
    url = command.stdout.readline().strip()
    with httpx.Client(base_url=url.partition("?")[0], trust_env=False, timeout=60) as client:
        assert client.get("/api/runs").status_code == 401
        answer = client.get(url, follow_redirects=True)
        assert answer.status_code == 200 and "server" not in answer.headers
        assert {run["run"] for run in client.get("/api/runs").json()["runs"]} == {"r", "s"}
        with client.stream("GET", "/api/live") as stream:
            assert next(stream.iter_lines()) == "event: runs"
            command.send_signal(signal.SIGINT)
            assert command.wait(60) == 0
    said = command.stderr.read()
    assert "ssh -N -L" in said and "Traceback" not in said and url.rpartition("=")[2] not in said


class Slurm:
    """Answers queries, and counts them."""

    def __init__(self) -> None:
        self.asked = 0
        self.state: str | None = "PENDING"
        self.answers = threading.Event()
        self.answers.set()

    def query(self, run: RunDirectory) -> server.JobQuery:
        def ask(job: JobRecord) -> str | None:
            self.answers.wait(60)
            self.asked += 1
            if self.state == "fails":
                raise ClusterError("slurmctld is down")
            return self.state

        return ask


def test_slurm_is_asked_rarely_and_by_one_thread(tmp_path: Path) -> None:
    slurm, clock, job = Slurm(), Clock(), JobRecord("7", "slurm", 0.0)
    states = JobStates(slurm.query, clock)
    state = states.of(RunDirectory(tmp_path / "r"), wait_s=60)
    assert [state(job) for _ in range(5)] == ["PENDING"] * 5 and slurm.asked == 1
    slurm.state = None
    clock.now += ACTIVE_S + 1
    assert state(job) == "PENDING", "the last answer counts until there is a new one"
    states.close()
    states = JobStates(slurm.query, clock)
    state = states.of(RunDirectory(tmp_path / "r"), wait_s=60)
    assert state(job) is None
    asked = slurm.asked
    clock.now += ENDED_S - 1
    assert state(job) is None and slurm.asked == asked
    states.close()


def test_nobody_waits_for_a_slurm_that_does_not_answer(tmp_path: Path) -> None:
    slurm = Slurm()
    slurm.answers.clear()
    states = JobStates(slurm.query)
    assert states.of(RunDirectory(tmp_path / "r"))(JobRecord("7", "slurm", 0.0)) == NO_ANSWER
    slurm.state = "fails"
    slurm.answers.set()
    assert states.of(RunDirectory(tmp_path / "q"), wait_s=60)(JobRecord("8", "slurm", 0.0)) == NO_ANSWER
    states.close()


def test_asking_for_a_job_without_an_id_writes_nothing(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r")
    job = JobRecord("", "slurm", 0.0, submission="word", host="elsewhere")
    run.attempt(2).record_job(job)
    before = (run.attempt(2).path / "job.json").read_bytes()
    assert looking_query(run)(job) is None
    assert (run.attempt(2).path / "job.json").read_bytes() == before

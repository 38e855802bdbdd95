"""The secret of a run: where it is stored, and which peers are admitted."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from primeslurm.node.agent.process_manager import ProcessManager
from primeslurm.plan.model import Plan, Process
from primeslurm.plan.planner import derive
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.records.fleet import FleetView
from primeslurm.records.journal import Journal
from primeslurm.run.directory import RunDirectory, create, missing_variables
from primeslurm.slurm.render import render
from primeslurm.wire.transport import curve, secret
from primeslurm.wire.transport.addresses import Addresses
from tests.support.plans import plan_of
from tests.support.recipes import site, write_recipe
from tests.support.waiting import wait_until


def made(tmp_path: Path) -> tuple[Plan, str]:
    """A created run and its secret."""
    path = write_recipe(tmp_path / "r.yaml")
    recipe = load_recipe(path)
    plan = derive(recipe, site(), tmp_path / "runs" / "test-run")
    create(recipe, plan, path)
    return plan, secret.read(Path(plan.run_dir))


def test_a_run_keeps_its_secret_to_its_owner_and_in_one_file(tmp_path: Path) -> None:
    plan, own = made(tmp_path)
    run = Path(plan.run_dir)
    assert len(bytes.fromhex(own)) == 32
    assert stat.S_IMODE((run / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    holding = [p for p in run.rglob("*") if p.is_file() and own in p.read_text()]
    assert holding == [run / "secret"]
    assert own not in render(plan) and own not in plan.to_json()
    secret.create(run)
    assert secret.read(run) == own  # a resumed run keeps it


def test_every_run_has_its_own_secret(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert made(tmp_path / "a")[1] != made(tmp_path / "b")[1]


def manager_of(tmp_path: Path, process: Process) -> tuple[ProcessManager, Addresses]:
    """Return the process manager of a plan with `process`, and the published addresses."""
    run = RunDirectory(tmp_path / "run")
    plan = plan_of(run.path, (process,))
    plan = plan.model_copy(update={"env": {**plan.env, secret.VARIABLE: "${secret}"}})
    attempt = run.attempt(1)
    attempt.prepare(plan)
    secret.create(run.path)
    values = {"run_dir": str(run.path), "tmp": str(tmp_path)}
    processes = ProcessManager(plan, plan.nodes[0], attempt, "127.0.0.1", values, Journal(attempt.path, "agent-0"))
    return processes, Addresses(hosts={process.name: "127.0.0.1"}, ports={process.name: {}})


READS = """
import multiprocessing, subprocess, sys, time
from pathlib import Path
from primeslurm.wire.transport import secret

def own(place):
    (Path(sys.argv[1]) / place).write_text(secret.own_secret()[::-1])

if __name__ == "__main__":
    if "early" in sys.argv: secret.take()
    own("itself")
    for method in ("spawn", "forkserver", "fork"):
        child = multiprocessing.get_context(method).Process(target=own, args=(method,))
        child.start(); child.join()
    code = "from primeslurm.wire.transport import secret; print(secret.own_secret())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (Path(sys.argv[1]) / "told").write_text(told.stderr)
    (Path(sys.argv[1]) / "told").rename(Path(sys.argv[1]) / "done")
    time.sleep(3600)
"""


def proc_files(pid: int) -> list[Path]:
    """Return the files in `/proc` with environment and command line of a process and its descendants."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("environ", "cmdline")]


def test_processes_get_the_secret_and_proc_never_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, "of the one who submits")
    (tmp_path / "reads.py").write_text(READS)
    argv = (sys.executable, str(tmp_path / "reads.py"), str(tmp_path))
    process = Process(name="p", role="environment", node=0, argv=argv, log="logs/p.log")
    processes, addresses = manager_of(tmp_path, process)
    processes.tick(time.time(), FleetView(time=0.0), addresses, environments=False)
    assert not processes.children, "workers wait until environments load"
    processes.tick(time.time(), FleetView(time=0.0), addresses)
    try:
        pid, own = processes.children["p"].pid, secret.read(tmp_path / "run")

        def done() -> bool:
            for path in proc_files(pid):
                with contextlib.suppress(OSError):
                    shown = path.read_text()
                    assert own not in shown and f"{secret.VARIABLE}=" not in shown
            return (tmp_path / "done").exists()

        wait_until(done, poll_s=0.02)
        for place in ("itself", "spawn", "forkserver", "fork"):
            assert (tmp_path / place).read_text() == own[::-1], f"multiprocessing passes it on: {place}"
        assert "no secret was handed over" in (tmp_path / "done").read_text(), "other programs do not get it"
        held = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        assert not [name for name in held if name.startswith("socket")], "the socket it was read from is closed"
        written = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and own in p.read_text()]
        assert written == [tmp_path / "run" / "secret"]
    finally:
        processes.children["p"].kill()


def test_an_unrelated_descriptor_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secret.VARIABLE)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"x")
        for value in (f"{theirs.fileno()}:1", "99999:1"):
            monkeypatch.setenv(secret.HANDED_OVER, value)
            with pytest.raises(secret.SecretError):
                secret.own_secret()
            assert secret.HANDED_OVER not in os.environ
        assert theirs.recv(1) == b"x"


def test_a_command_line_cannot_contain_the_secret(tmp_path: Path) -> None:
    process = Process(name="p", role="router", node=0, argv=("x", "${secret}"), log="logs/p.log")
    processes, addresses = manager_of(tmp_path, process)
    with pytest.raises(KeyError, match="in "):
        processes.tick(time.time(), FleetView(time=0.0), addresses)


def reaches(
    server: zmq.Socket[bytes], address: str, prepare: Callable[[zmq.Socket[bytes]], None], within_ms: int = 1000
) -> bool:
    """Return whether a message of a client arrives at the server."""
    with zmq.Context.instance().socket(zmq.DEALER) as client:
        client.linger = 0
        prepare(client)
        client.connect(address)
        with contextlib.suppress(zmq.Again):  # already refused
            client.send(b"hello", zmq.NOBLOCK)
        if not server.poll(within_ms):
            return False
        server.recv_multipart()
        return True


def test_zmq_peers_need_the_secret() -> None:
    def wrong(client: zmq.Socket[Any]) -> None:
        public, private = zmq.curve_keypair()
        client.curve_publickey, client.curve_secretkey, client.curve_serverkey = public, private, public

    with zmq.Context.instance().socket(zmq.ROUTER) as server:
        server.linger = 0
        curve.secure_server(server)
        address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
        assert not reaches(server, address, lambda client: None)
        assert not reaches(server, address, wrong)
        assert reaches(server, address, curve.secure_client, within_ms=600_000)


def test_a_peer_without_a_handshake_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "HANDSHAKE_S", 0.1)
    with zmq.Context.instance().socket(zmq.ROUTER) as server:
        curve.secure_server(server)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
            while silent.recv(64):  # the beginning of a greeting
                pass


def test_kept_secret_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, own := secret.own_secret())
    monkeypatch.setattr(secret, "_secret", "")
    secret.keep()
    assert secret.VARIABLE not in os.environ
    assert secret.header() == {"Authorization": f"Bearer {own}"}


def test_kept_secret_is_erased_from_proc_environ() -> None:
    code = (
        "from primeslurm.wire.transport import secret; from pathlib import Path; secret.keep();"
        " print(secret.own_secret(), secret.own_secret() in Path('/proc/self/environ').read_text())"
    )
    env = {**os.environ, secret.VARIABLE: "5ec2e7" * 4}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5ec2e7" * 4, "False"]


def test_client_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, secret.VARIABLE)
    with pytest.raises(secret.SecretError):
        secret.header()


def test_passed_variables_must_be_set_and_are_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_recipe(tmp_path / "r.yaml", pass_env=["WANDB_API_KEY"])
    recipe = load_recipe(path)
    plan = derive(recipe, site(pass_env=["HF_TOKEN"]), tmp_path / "run")
    monkeypatch.setenv("HF_TOKEN", "hf-value")
    assert [violation.value for violation in missing_variables(plan)] == ["WANDB_API_KEY"]
    monkeypatch.setenv("WANDB_API_KEY", "wandb-value")
    assert missing_variables(plan) == []
    create(recipe, plan, path)
    texts = [render(plan), *(p.read_text() for p in (tmp_path / "run").rglob("*") if p.is_file())]
    assert not any("hf-value" in text or "wandb-value" in text for text in texts)

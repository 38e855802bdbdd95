"""Emulated trainer ranks as processes: if one dies, all do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from benchmarks.support.ports import free_port
from primeslurm.testbed.emulated import rank_group as emulated
from tests.support.port_messages import MESSAGES

LEADER = """
import os, signal, sys, time
from primeslurm.testbed.emulated.rank_group import Ranks
ranks = Ranks(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]) - 1)
signal.signal(signal.SIGUSR1, ranks.interrupt)
ranks.join(timeout_s=float(sys.argv[1]))
print("joined", flush=True)
while not ranks.interrupted():
    time.sleep(0.02)
ranks.close(75)
sys.exit(75)
"""
Start = Callable[[int], subprocess.Popen[str]]


@pytest.fixture
def port() -> int:
    """Return the port of the rendezvous."""
    return free_port()


@pytest.fixture
def start(port: int) -> Iterator[Start]:
    """Return a function that starts a rank of a world of three. Rank 0 trains until it is interrupted."""
    processes: list[subprocess.Popen[str]] = []

    def begin(rank: int, timeout_s: float = 600) -> subprocess.Popen[str]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = {**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": "3"}
        argv = ["-c", LEADER, str(timeout_s)] if rank == 0 else ["-m", "primeslurm.testbed.emulated.trainer"]
        processes.append(subprocess.Popen([sys.executable, *argv], env=env, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def joined(start: Start) -> list[subprocess.Popen[str]]:
    ranks = [start(rank) for rank in (2, 0, 1)]
    leader = ranks[1]
    assert leader.stdout is not None and leader.stdout.readline() == "joined\n"
    return [ranks[1], ranks[2], ranks[0]]


@pytest.mark.parametrize("signalled", [0, 2])
def test_interrupting_any_rank_ends_all_with_a_checkpoint(start: Start, signalled: int) -> None:
    ranks = joined(start)
    ranks[signalled].send_signal(signal.SIGUSR1)
    assert [rank.wait() for rank in ranks] == [75, 75, 75]


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_all_ranks(start: Start, victim: int) -> None:
    ranks = joined(start)
    ranks[victim].kill()
    assert [rank.wait() for rank in ranks] == [-9 if i == victim else 1 for i in range(3)]


def test_missing_rank_is_reported(start: Start) -> None:
    leader = start(0, 0.1)  # type: ignore[call-arg]
    assert leader.wait() == 1


def stranger(port: int, says: bytes) -> socket.socket:
    """Connect as soon as rank 0 listens, and send something."""
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        except ConnectionRefusedError:
            time.sleep(0.02)
            continue
        connection.sendall(says)
        return connection


def test_connection_without_the_secret_is_not_a_rank(start: Start, port: int) -> None:
    leader = start(0)
    messages = (b"", emulated.ARRIVED, bytes(64), MESSAGES["garbage"], b"")
    strangers = [stranger(port, says) for says in messages]
    strangers[-1].close()
    others = [start(1), start(2)]
    assert leader.stdout is not None and leader.stdout.readline() == "joined\n"
    leader.send_signal(signal.SIGUSR1)
    assert [rank.wait() for rank in (leader, *others)] == [75, 75, 75]


def test_rank_rejects_an_impostor_of_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]

        def lie() -> None:
            with impostor.accept()[0] as rank:
                rank.sendall(bytes(32))
                rank.recv(64)
                rank.sendall(bytes(32) + bytes([0]))
            impostor.close()

        liar = threading.Thread(target=lie)
        liar.start()
        with pytest.raises(emulated.LostRankError):
            emulated._connect("127.0.0.1", port, 0.0001)
        liar.join()

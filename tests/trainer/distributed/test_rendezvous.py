"""Protection of the trainer's rendezvous against other users: torch's store and its gate."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from benchmarks.support.ports import free_port
from primeslurm.wire.transport import rendezvous, secret
from primeslurm.wire.transport.rendezvous_store import serve_store
from primeslurm.wire.weight_transfer.collective import Store, TransferError
from tests.support.forks import TRAINER, server

LATE = timedelta(seconds=600)


def attack(*ports: int) -> tuple[list[str], list[str]]:
    """Attack ports from /proc/net/tcp as another user of the node would. Return the results, and that of the gate."""
    forks = server(TRAINER, OMP_NUM_THREADS="1")
    env = {**os.environ, secret.VARIABLE: "1" * 64}
    words = ("tests.trainer.distributed.strangers", *map(str, ports))
    output, _ = forks.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env).communicate()
    lines = [line.partition(" ") for line in output.splitlines()]
    by_word = [[text for first, _, text in lines if first == word] for word in ("ATTACK", "CATALOGUE")]
    return by_word[0], by_word[1]


@dataclass
class Meeting:
    store: dist.TCPStore
    port: int
    way: int
    inner: int


@pytest.fixture(scope="module")
def meeting() -> Meeting:
    port = free_port()
    store = serve_store("127.0.0.1", port)
    return Meeting(store, port, rendezvous.tunnel("127.0.0.1", port, 600), store.port)


def test_ranks_connect_through_their_gates(meeting: Meeting) -> None:
    meeting.store.set("key", "ours")
    meeting.store.set("count", "0")
    mine = dist.TCPStore("127.0.0.1", meeting.way, is_master=False, timeout=LATE)
    assert mine.get("key") == b"ours" and mine.add("count", 2) == 2
    other = mine.clone()
    other.set("large", "x" * 3_000_000)
    assert len(meeting.store.get("large")) == 3_000_000


def test_gate_protects_the_store_from_strangers(meeting: Meeting) -> None:
    """Neither at the rendezvous port, nor at a rank's gate, nor at torch's own port."""
    bare = dist.TCPStore("127.0.0.1", port := free_port(), is_master=True, wait_for_workers=False)
    for store in (bare, meeting.store):
        store.set("key", "ours")
        store.set("count", "1")
    actual, catalogue = attack(port, meeting.way, meeting.inner, meeting.port)
    assert actual[0] == "took over True True" and bare.get("key") == b"theirs"
    assert len(actual) == 4 and all(error.endswith("Error") for error in actual[1:]), actual
    assert meeting.store.get("key") == b"ours" and meeting.store.check(["count"])
    assert catalogue == ["TransferError"], "its secret is wrong"
    assert not meeting.store.check(["primeslurm/weights/catalogue"])


def test_gate_is_mute_before_the_secret(meeting: Meeting) -> None:
    before = psutil.Process().num_fds()
    strangers = []
    for sent in (b"", b"x" * 10, os.urandom(64), os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n" + bytes(64)):
        stranger = socket.create_connection(("127.0.0.1", meeting.port), timeout=60)
        stranger.sendall(sent)
        strangers.append(stranger)
    for stranger in strangers[2:]:
        answer = b""
        while part := _received(stranger):
            answer += part
        assert len(answer) == 64  # random bytes, and a proof that only says who the gate is
    for stranger in strangers:
        stranger.close()
    assert meeting.store.get("key") == b"ours"
    assert psutil.Process().num_fds() <= before + len(strangers)


def _received(at: socket.socket) -> bytes:
    try:
        return at.recv(4096)
    except ConnectionResetError:
        return b""


def test_client_without_gate_times_out() -> None:
    with pytest.raises(TransferError):
        Store(f"127.0.0.1:{free_port()}", 2).catalogue()


def test_connection_before_the_gate_opened_is_detected() -> None:
    listening = rendezvous.bound_store_socket()
    listening.listen()
    at = listening.getsockname()
    with listening, socket.create_connection(at), socket.create_connection(at):
        refused = pytest.raises(rendezvous.RendezvousError, match="another process is connected")
        with refused:
            rendezvous.open_gate("127.0.0.1", free_port(), listening)


def test_store_uses_another_port_if_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a program waits for its own server at a port that was free before."""
    strangers: list[socket.socket] = []
    opened = rendezvous.open_gate

    def polled(host: str, port: int, store: socket.socket, gate: socket.socket | None) -> None:
        if len(strangers) < 2:
            strangers.append(socket.create_connection(store.getsockname()))
        opened(host, port, store, gate)

    monkeypatch.setattr(rendezvous, "open_gate", polled)
    store = serve_store("127.0.0.1", free_port())
    assert len(strangers) == 2
    assert store.port not in [stranger.getpeername()[1] for stranger in strangers]
    for stranger in strangers:
        stranger.close()


def test_the_kernel_signs(meeting: Meeting) -> None:
    """Without TCP-MD5 in the kernel, users of rank 0's node could reach the store."""
    with socket.socket() as probe:
        probe.settimeout(1)
        with pytest.raises(TimeoutError):
            probe.connect(("127.0.0.1", meeting.inner))

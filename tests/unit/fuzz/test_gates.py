"""Servers that accept connections from anybody and check their first bytes: a router's endpoint, the ranks' gate and
passage.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.ports import free_port
from primeslurm.inference.router.health_endpoint import RouterHealthEndpoint
from primeslurm.wire.transport import rendezvous, secret
from primeslurm.wire.transport.rendezvous import NONCE_BYTES as NONCE
from primeslurm.wire.transport.rendezvous import proof
from tests.unit.fuzz.mutations import fuzzed, texts

HOST = "127.0.0.1"
ASKED = b"for the store"
LOOK = b"GET /liveness HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n\r\n"


def exchange(port: int, *parts: bytes) -> bytes:
    """Send data, close the sending side, and return the response until the other side disconnects."""
    found = b""
    with socket.create_connection((HOST, port), timeout=120) as peer, contextlib.suppress(OSError):
        for part in parts:
            peer.sendall(part)
        peer.shutdown(socket.SHUT_WR)
        while chunk := peer.recv(65536):
            found += chunk
    return found


class Listener:
    """Serves one connection after another in a thread, and counts them."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._listening = socket.create_server((HOST, 0))
        self.port = int(self._listening.getsockname()[1])
        self.accepted = 0
        self._serve = serve
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listening.accept()
            except OSError:
                return
            self.accepted += 1
            with peer, contextlib.suppress(OSError):
                self._serve(peer)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def exactly(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (chunk := peer.recv(size - len(found))):
        found += chunk
    return found


def echo(peer: socket.socket) -> None:
    """Act as a store that echoes the request."""
    peer.sendall(exactly(peer, len(ASKED)))


# the health endpoint of a router


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[RouterHealthEndpoint, int]]:
    async def look(path: str) -> int:
        return 200

    made, port = RouterHealthEndpoint(secret.own_secret(), look, lambda: True), free_port()

    async def serve() -> int:
        await made.serve(HOST, port)
        return port

    rendezvous._run(serve())
    yield made, port
    assert exchange(port, LOOK).startswith(b"HTTP/1.1 200 ")


@fuzzed()
@given(texts(LOOK) | st.binary(max_size=64))
def test_endpoint_answers_or_disconnects_strangers(endpoint: tuple[RouterHealthEndpoint, int], data: bytes) -> None:
    made, port = endpoint
    found = exchange(port, data)
    assert not found or found.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 404 "))
    assert made.refused_bytes == 0
    assert exchange(port, LOOK).startswith(b"HTTP/1.1 200 ")


@fuzzed()
@given(texts(secret.header()["Authorization"].encode()))
def test_endpoint_accepts_only_the_secret(endpoint: tuple[RouterHealthEndpoint, int], token: bytes) -> None:
    made, _ = endpoint
    right = secret.header()["Authorization"].encode()
    assert made._judge(token) == (200 if token == right else 401)
    made.refused_bytes = 0


# the gate and the passage of ranks


@pytest.fixture(scope="module")
def gate() -> Iterator[tuple[Listener, int]]:
    store, port = Listener(echo), free_port()
    rendezvous._run(rendezvous._Gate(store.port, b"", rendezvous._key()).open(HOST, port))
    yield store, port
    store.close()


def enter(port: int, first: bytes, flipped: int | None = None) -> bytes:
    """Pass a gate, and return the store's response. `flipped`: the bit of the proof to flip."""
    with socket.create_connection((HOST, port), timeout=120) as peer, contextlib.suppress(OSError):
        peer.sendall(first)
        if len(first) < NONCE:
            peer.shutdown(socket.SHUT_WR)
            return exactly(peer, 1)
        said = exactly(peer, 2 * NONCE)
        mine, theirs = first[:NONCE], said[:NONCE]
        assert said[NONCE:] == proof(rendezvous._key(), b"gate", mine, theirs)
        shown = bytearray(proof(rendezvous._key(), b"passage", theirs, mine))
        if flipped is not None:
            shown[flipped // 8] ^= 1 << flipped % 8
        peer.sendall(bytes(shown) + ASKED)
        if flipped is not None:
            peer.shutdown(socket.SHUT_WR)
        return exactly(peer, len(ASKED))
    return b""


@fuzzed()
@given(texts(bytes(NONCE)), st.integers(0, 8 * NONCE - 1))
def test_gate_requires_a_proof(gate: tuple[Listener, int], first: bytes, flipped: int) -> None:
    store, port = gate
    before = store.accepted
    assert enter(port, first, flipped) == b""
    assert enter(port, os.urandom(NONCE)) == ASKED
    assert store.accepted == before + 1, "nobody else reached the store"


@fuzzed()
@given(st.binary(max_size=8 * NONCE))
def test_gate_serves_the_next_client_after_any_input(gate: tuple[Listener, int], data: bytes) -> None:
    store, port = gate
    before = store.accepted
    assert len(exchange(port, data)) <= (2 * NONCE if len(data) >= NONCE else 0)
    assert enter(port, os.urandom(NONCE)) == ASKED
    assert store.accepted == before + 1


class Impostor:
    """Listens in place of a gate, and sends what a test sets."""

    def __init__(self) -> None:
        self.flipped: int | None = None
        self.says: bytes | None = None
        """Sent in place of a nonce and a proof."""
        self.told = b""
        """Bytes from the last client."""

    def __call__(self, peer: socket.socket) -> None:
        theirs, mine = exactly(peer, NONCE), os.urandom(NONCE)
        said = bytearray(mine + proof(rendezvous._key(), b"gate", theirs, mine))
        if self.flipped is not None:
            said[self.flipped // 8] ^= 1 << self.flipped % 8
        peer.sendall(bytes(said) if self.says is None else self.says)
        if self.says is not None:
            peer.shutdown(socket.SHUT_WR)
        shown = exactly(peer, NONCE)
        if self.says is None and self.flipped is None:
            echo(peer)
        else:
            self.told = shown + exactly(peer, len(ASKED))


@pytest.fixture(scope="module")
def passage() -> Iterator[tuple[Impostor, int]]:
    impostor = Impostor()
    listener = Listener(impostor)
    yield impostor, rendezvous.tunnel(HOST, listener.port, 60)
    listener.close()


@fuzzed()
@given(texts(bytes(2 * NONCE)) | st.integers(0, 16 * NONCE - 1))
def test_passage_sends_nothing_to_an_impostor(passage: tuple[Impostor, int], said: bytes | int) -> None:
    impostor, way = passage
    impostor.says, impostor.flipped = (said, None) if isinstance(said, bytes) else (None, said)
    assert exchange(way, ASKED) == b""
    impostor.says = impostor.flipped = None
    with socket.create_connection((HOST, way), timeout=120) as peer:
        peer.sendall(ASKED)
        assert exactly(peer, len(ASKED)) == ASKED
    assert impostor.told == b""


@pytest.mark.parametrize("name", ["endpoint", "gate"])
def test_strangers_cannot_exhaust_a_workers_memory(name: str, request: pytest.FixtureRequest) -> None:
    _, port = request.getfixturevalue(name)
    before = psutil.Process().memory_info().rss
    with socket.create_connection((HOST, port), timeout=60) as peer, contextlib.suppress(OSError):
        peer.settimeout(5)
        for _ in range(192):
            peer.sendall(bytes(1 << 20))
    assert psutil.Process().memory_info().rss - before < 96 << 20

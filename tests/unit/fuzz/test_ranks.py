"""Handshakes of emulated ranks. Without the secret nobody becomes a rank, or rank 0."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.testbed.emulated import rank_group
from primeslurm.wire.transport.rendezvous import NONCE_BYTES as NONCE
from primeslurm.wire.transport.rendezvous import PROOF_BYTES as PROOF
from primeslurm.wire.transport.rendezvous import proof
from tests.unit.fuzz.mutations import fuzzed, texts
from tests.unit.fuzz.test_gates import HOST, exactly, exchange

KEY = rank_group.key_for(rank_group.USE)
SHOWN = NONCE + PROOF
"""Bytes of a rank's proof."""


class Leader:
    """Rank 0, in a thread until `close`. It sends a byte to every rank that it accepts."""

    def __init__(self) -> None:
        self.admitted = 0
        self._listener = socket.create_server((HOST, 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._listener, rank_group._Authenticator(self._listener) as authenticator:
            while not self._closing.is_set():
                for rank in authenticator.accepted(0.05):
                    self.admitted += 1
                    rank.sendall(rank_group.GO)
                    rank.close()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(60)


@pytest.fixture(scope="module")
def leader() -> Iterator[Leader]:
    found = Leader()
    yield found
    assert found.alive, "it served to the end"
    found.close()


def admits_a_rank(leader: Leader) -> bool:
    before = leader.admitted
    with rank_group._entered(socket.create_connection((HOST, leader.port)), KEY, 60) as rank:
        return rank.recv(1) == rank_group.GO and leader.admitted == before + 1


@fuzzed()
@given(texts(bytes(SHOWN)) | st.binary(max_size=4 * SHOWN))
def test_arbitrary_bytes_do_not_make_a_rank(leader: Leader, said: bytes) -> None:
    before = leader.admitted
    assert len(exchange(leader.port, said)) <= NONCE, "random bytes, and nothing that proves anything"
    assert leader.admitted == before and admits_a_rank(leader)


@fuzzed()
@given(st.integers(0, 8 * SHOWN - 1) | st.sampled_from([b"rank 0", b"gate", b""]))
def test_proof_with_one_wrong_bit_is_rejected(leader: Leader, wrong: int | bytes) -> None:
    before = leader.admitted
    with socket.create_connection((HOST, leader.port), timeout=60) as peer:
        theirs, mine = exactly(peer, NONCE), os.urandom(NONCE)
        shown = bytearray(mine + proof(KEY, wrong if isinstance(wrong, bytes) else b"rank", theirs, mine))
        if isinstance(wrong, int):
            shown[wrong // 8] ^= 1 << wrong % 8
        peer.sendall(shown)
        with contextlib.suppress(ConnectionError):
            assert peer.recv(PROOF) == b""
    assert leader.admitted == before and admits_a_rank(leader)


def test_strangers_cannot_exhaust_a_workers_memory(leader: Leader) -> None:
    before = psutil.Process().memory_info().rss
    with socket.create_connection((HOST, leader.port), timeout=60) as peer, contextlib.suppress(OSError):
        peer.settimeout(5)
        for _ in range(192):
            peer.sendall(bytes(1 << 20))
    assert psutil.Process().memory_info().rss - before < 96 << 20 and admits_a_rank(leader)


@fuzzed()
@given(texts(bytes(NONCE + PROOF)) | st.integers(0, 8 * (NONCE + PROOF) - 1))
def test_rank_rejects_invalid_messages_of_rank_0(said: bytes | int) -> None:
    """If rank 0 is an impostor or the connection is disturbed, a rank raises an error that makes it retry."""
    impostor, rank = socket.socketpair()

    def lie() -> None:
        mine = os.urandom(NONCE)
        if isinstance(said, int):
            impostor.sendall(flipped(mine, said))
            shown = exactly(impostor, SHOWN)
            impostor.sendall(flipped(proof(KEY, b"rank 0", shown[:NONCE], mine), said - 8 * NONCE))
        else:
            impostor.sendall(said)
        impostor.shutdown(socket.SHUT_WR)

    liar = threading.Thread(target=lie)
    liar.start()
    with impostor:
        with pytest.raises((PermissionError, ConnectionError)):
            rank_group._entered(rank, KEY, 60)
        liar.join()
    assert rank.fileno() == -1, "closed"


def flipped(data: bytes, bit: int) -> bytes:
    """Return the bytes with one bit flipped, if they have that bit."""
    found = bytearray(data)
    if 0 <= bit < 8 * len(data):
        found[bit // 8] ^= 1 << bit % 8
    return bytes(found)

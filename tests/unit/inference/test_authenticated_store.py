"""Stores through which engines of one group find each other, as vLLM makes them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from primeslurm.inference.authenticated_store import AuthenticatedStore
from tests.support.port_messages import MESSAGES

HOST = "127.0.0.1"
SOON = timedelta(seconds=60)
OTHER = """
import sys
from primeslurm.inference.authenticated_store import AuthenticatedStore
store = AuthenticatedStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
store.set("said", store.get("asked"))
store.get("said")  # it has arrived
"""


def serve(port: int = 0, gate: socket.socket | None = None) -> AuthenticatedStore:
    fd = None if gate is None else gate.detach()
    return AuthenticatedStore(HOST, port, 2, is_master=True, timeout=SOON, multi_tenant=True, master_listen_fd=fd)


@pytest.fixture(scope="module")
def store() -> AuthenticatedStore:
    """Yield a store at a free port."""
    return serve()


def test_other_processes_reach_the_store(store: AuthenticatedStore) -> None:
    store.set("asked", "yes")
    subprocess.run([sys.executable, "-c", OTHER, str(store.port)], check=True, timeout=300)
    assert store.get("said") == b"yes"


def test_serving_rank_may_connect_again(store: AuthenticatedStore) -> None:
    """NCCL's groups clone the store."""
    clone = store.clone()
    clone.set("cloned", "yes")
    assert store.get("cloned") == b"yes"


def test_gate_may_use_a_listening_socket(store: AuthenticatedStore) -> None:
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    with socket.create_connection((HOST, port), timeout=60) as early:
        made = serve(port, listening)
        assert made.port == port
        client = AuthenticatedStore(HOST, port, 2, timeout=SOON, multi_tenant=True)
        client.set("key", "value")
        assert made.get("key") == b"value" and client.port == port
        early.sendall(MESSAGES["a store's client"])
        assert early.recv(8, socket.MSG_WAITALL) != made.num_keys().to_bytes(8, "little"), "a gate, and no store"


def test_forked_process_has_its_own_passage(store: AuthenticatedStore) -> None:
    """Engine cores are forked from servers that have created a store already."""
    assert AuthenticatedStore(HOST, store.port, timeout=SOON).add("count", 1) == 1
    pid = os.fork()
    if pid == 0:
        try:
            AuthenticatedStore(HOST, store.port, timeout=SOON).add("count", 1)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert store.add("count", 0) == 2

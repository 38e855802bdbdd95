"""Stores through which engines of one group find each other, as vLLM makes them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from primeslurm.inference.gated_store import GatedStore
from tests.support.doors import MESSAGES

HOST = "127.0.0.1"
SOON = timedelta(seconds=60)
OTHER = """
import sys
from primeslurm.inference.gated_store import GatedStore
store = GatedStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
store.set("said", store.get("asked"))
store.get("said")  # it has arrived
"""


def serve(port: int = 0, gate: socket.socket | None = None) -> GatedStore:
    fd = None if gate is None else gate.detach()
    return GatedStore(HOST, port, 2, is_master=True, timeout=SOON, multi_tenant=True, master_listen_fd=fd)


@pytest.fixture(scope="module")
def store() -> GatedStore:
    """Yield a store at a free port."""
    return serve()


def test_other_processes_of_the_run_find_it_by_its_port(store: GatedStore) -> None:
    store.set("asked", "yes")
    subprocess.run([sys.executable, "-c", OTHER, str(store.port)], check=True, timeout=300)
    assert store.get("said") == b"yes"


def test_the_rank_that_serves_it_may_connect_anew(store: GatedStore) -> None:
    """NCCL's groups clone the store."""
    clone = store.clone()
    clone.set("cloned", "yes")
    assert store.get("cloned") == b"yes"


def test_its_gate_may_listen_already(store: GatedStore) -> None:
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    with socket.create_connection((HOST, port), timeout=60) as early:
        made = serve(port, listening)
        assert made.port == port
        client = GatedStore(HOST, port, 2, timeout=SOON, multi_tenant=True)
        client.set("key", "value")
        assert made.get("key") == b"value" and client.port == port
        early.sendall(MESSAGES["a store's client"])
        assert early.recv(8, socket.MSG_WAITALL) != made.num_keys().to_bytes(8, "little"), "a gate, and no store"


def test_a_process_that_was_forked_has_a_way_of_its_own(store: GatedStore) -> None:
    """Engine cores are forked from servers that have created a store already."""
    assert GatedStore(HOST, store.port, timeout=SOON).add("count", 1) == 1
    pid = os.fork()
    if pid == 0:
        try:
            GatedStore(HOST, store.port, timeout=SOON).add("count", 1)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert store.add("count", 0) == 2

"""vLLM's sockets with the plugin: contexts that vLLM ends, socket types that it uses, and strangers at the ports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from primeslurm.inference.encrypted_sockets import EncryptedContext
from primeslurm.wire.transport import secret
from tests.support.port_messages import Port, send_all

HOST = "127.0.0.1"
OTHER = """
import sys, zmq
from primeslurm.inference.encrypted_sockets import EncryptedContext
with zmq.Context() as context, EncryptedContext(context, False).socket(zmq.DEALER) as client:
    client.linger = 0
    client.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
    client.send(b"from another process")
    print(client.recv().decode() if client.poll(int(sys.argv[2])) else "nothing")
"""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Yield a context that ends as vLLM ends it: with its sockets, waiting for them."""
    found = zmq.Context()
    yield found
    found.destroy(linger=0)


def serve(context: zmq.Context[zmq.Socket[bytes]], kind: int = zmq.ROUTER) -> tuple[zmq.Socket[bytes], int]:
    found = EncryptedContext(context, True).socket(kind)
    return found, found.bind_to_random_port(f"tcp://{HOST}")


def other(port: int, patience_ms: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER, str(port), str(patience_ms)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_only_processes_of_the_run_can_send(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, port = serve(context)
    send_all([Port("r", HOST, port)], 1.0)
    with zmq.Context() as theirs, theirs.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{HOST}:{port}")
        stranger.send(b"from a stranger")
        ours = other(port, 60_000)
        who, what = server.recv_multipart()
        server.send_multipart([who, b"heard"])
        assert (what, ours.communicate(timeout=120)[0]) == (b"from another process", "heard\n")
        monkeypatch.setenv(secret.VARIABLE, "1" * 64)
        assert other(port, 500).communicate(timeout=120)[0] == "nothing\n"
        assert not server.poll(0), "nobody else was heard"


def test_published_messages_do_not_reach_strangers(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher, port = serve(context, zmq.XPUB)
    ours = EncryptedContext(context, False).socket(zmq.SUB)
    theirs = context.socket(zmq.SUB)
    for reader in (theirs, ours):
        reader.subscribe(b"")
        reader.connect(f"tcp://{HOST}:{port}")
    assert publisher.recv() == b"\x01"
    publisher.send(b"news")
    assert ours.recv() == b"news" and not theirs.poll(0) and not publisher.poll(0)

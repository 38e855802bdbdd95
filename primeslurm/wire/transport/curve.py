"""ZMQ sockets with authentication and encryption (CURVE), with a key pair that is derived from the run's secret.

A peer without the run's secret does not know the server's public key, so it cannot complete a handshake. ZMQ buffers
messages of the handshake like any other, so servers also set MAXMSGSIZE: it bounds what a stranger can make them hold.

Encryption costs about 0.7 s of CPU time per GB on each end (1.7 s instead of 0.3 s for both). ZMQ encrypts in its I/O
threads, one per connection, so a server uses several I/O threads to serve many ranks at once.
"""

from __future__ import annotations

import functools
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from primeslurm.wire.transport import secret

IO_THREADS = 4  # ZMQ I/O threads of a process that serves bulk data
# Failed handshakes in a row that prove that a server has another key. ZMQ reconnects about every 0.1 s.
MAX_REFUSALS = 20


@functools.cache
def _keys(run_secret: str) -> tuple[bytes, bytes]:
    private = z85.encode(secret.key_for(b"zmq", run_secret))
    return zmq.curve_public(private), private


def secure_server(socket: zmq.Socket[Any]) -> None:
    """Accept only peers of this run, and drop peers that do not complete the handshake in time. Call before `bind`."""
    socket.curve_publickey, socket.curve_secretkey = _keys(secret.own_secret())
    socket.curve_server = True
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(secret.HANDSHAKE_S * 1000))


def secure_client(socket: zmq.Socket[Any]) -> None:
    """Connect only to servers of this run. Call before `connect`."""
    public, private = _keys(secret.own_secret())
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, private, public


def handshakes(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    """Return a socket with the handshake events of `socket`, for `refused`. Call before `connect`."""
    failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    return socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | failures | zmq.EVENT_HANDSHAKE_FAILED_AUTH)


async def refused(handshakes: zmq.asyncio.Socket) -> str:
    """Wait until the server has refused this run's key, and return its address: another run listens there.

    A CURVE server closes the connection without a reason, as a server does that is killed during a handshake. So only
    many failures in a row count.
    """
    failures, endpoint = 0, ""
    while failures < MAX_REFUSALS:
        message = await recv_monitor_message(handshakes)
        endpoint = message["endpoint"].decode()
        failures = 0 if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else failures + 1
    return endpoint

"""Serve torch's TCPStore, where ranks meet, behind a gate that requires the run's secret (`rendezvous`)."""

from __future__ import annotations

import contextlib
import socket

import torch.distributed as dist

from primeslurm.wire.transport import rendezvous

# Number of ports to try. A try fails if another program of the node connects to the port before this process does.
TRIES = 5


def serve_store(host: str, port: int, gate: socket.socket | None = None) -> dist.TCPStore:
    """Serve torch's store in this process, and return a client. The store serves as long as the client exists.

    The client cannot be cloned, because new connections must come through the gate. Raises OSError if the port is
    taken, and RendezvousError if another process was first at every try.
    """
    for _ in range(TRIES - 1):
        with contextlib.suppress(rendezvous.RendezvousError):
            return _served(host, port, gate)
    return _served(host, port, gate)


def _served(host: str, port: int, gate: socket.socket | None) -> dist.TCPStore:
    listening = rendezvous.bound_store_socket()
    with listening.dup() as ours:
        store_port = int(ours.getsockname()[1])
        fd = listening.detach()
        store = dist.TCPStore("127.0.0.1", store_port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        rendezvous.open_gate(host, port, ours, gate)
    return store

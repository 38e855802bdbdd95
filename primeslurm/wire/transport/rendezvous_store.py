"""torch's store, in which ranks meet, for those alone who have the run's secret (`rendezvous` says how)."""

from __future__ import annotations

import contextlib
import socket

import torch.distributed as dist

from primeslurm.wire.transport import rendezvous

PLACES = 5
"""Of a store, until nobody else is connected there: programs of the node may wait for a server of theirs there."""


def serve_store(host: str, port: int, gate: socket.socket | None = None) -> dist.TCPStore:
    """Serve torch's store, in this process.

    Args:
        host: where its gate listens.
        port: of the gate.
        gate: one that listens there already.

    Returns:
        A client of it, which cannot be cloned: nobody connects any more but through the gate. The store is there as
        long as this is.

    Raises:
        OSError: the port is taken.
        RendezvousError: somebody else was connected to the store already, wherever it was opened.
    """
    for _ in range(PLACES - 1):
        with contextlib.suppress(rendezvous.RendezvousError):
            return _served(host, port, gate)
    return _served(host, port, gate)


def _served(host: str, port: int, gate: socket.socket | None) -> dist.TCPStore:
    listening = rendezvous.reserve()
    with listening.dup() as ours:
        place = int(ours.getsockname()[1])
        fd = listening.detach()
        store = dist.TCPStore("127.0.0.1", place, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        rendezvous.open_gate(host, port, ours, gate)
    return store

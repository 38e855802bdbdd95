"""Ports for servers and ranks that benchmarks and tests start."""

from __future__ import annotations

import os
import random
import socket

HOST = "127.0.0.1"
# Ports outside the kernel's ephemeral range (/proc/sys/net/ipv4/ip_local_port_range). Such a port is still free when a
# rank binds it, after importing torch.
BELOW_EPHEMERAL = range(25000, 32000)
BLOCK = 50

_ports: list[int] = []
_claims: list[socket.socket] = []
os.register_at_fork(after_in_child=_ports.clear)  # these are the parent's


def free_port() -> int:
    """Return a free port, each time another one, which no other process gets from here."""
    while True:
        if not _ports:
            _ports.extend(_claim_block())
        port = _ports.pop()
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port


def _claim_block() -> range:
    """Claim ports for the life of this process, because groups of tests that run in parallel choose ports, too."""
    blocks = [range(first, first + BLOCK) for first in BELOW_EPHEMERAL[::BLOCK]]
    for block in random.SystemRandom().sample(blocks, len(blocks)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0primeslurm-test-ports-{block.start}")  # the kernel removes an abstract name with its socket
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return block
    raise RuntimeError("other processes have claimed all ports for tests and benchmarks")

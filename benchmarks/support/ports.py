"""Ports for servers and ranks that benchmarks and tests start."""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"
# Ports outside the kernel's ephemeral range (/proc/sys/net/ipv4/ip_local_port_range). Such a port is still free when a
# rank binds it, after importing torch.
BELOW_EPHEMERAL = range(25000, 32000)

_random = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """Return a free port, each time another one."""
    while True:
        port = _random.choice(BELOW_EPHEMERAL)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _given.add(port)
        return port

"""Ports for servers and ranks that benchmarks and tests start."""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"
BELOW_EPHEMERAL = range(25000, 32000)
"""The kernel gives none of these to whoever asks for any port (/proc/sys/net/ipv4/ip_local_port_range): a port of them
is still free when a rank, that has to import torch first, comes to bind it."""

_random = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """Return a port that is free now, and another one each time."""
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

"""Find out which user owns a connection to 127.0.0.1, because any user of the node can connect to it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# 127.0.0.1 in the kernel's tables, for an IPv4 and an IPv6 socket. torch connects with IPv6 sockets.
LOCAL = "0100007F", "0000000000000000FFFF00000100007F"
_NO_INODE = "0"  # Inode of a socket that its process has closed. The kernel then reports root as its owner.


class FarSocket(NamedTuple):
    """The peer's socket of a connection within this node, as the kernel lists it in /proc/net/tcp."""

    uid: int  # user who owns the socket
    inode: str


def far_socket(port: int, to: int) -> FarSocket | None:
    for family, local in zip(("tcp", "tcp6"), LOCAL, strict=True):
        ends = f"{local}:{port:04X}", f"{local}:{to:04X}"
        for row in rows(family):
            if (row[1], row[2]) == ends and row[9] != _NO_INODE:
                return FarSocket(int(row[7]), row[9])
    return None


def rows(family: str) -> list[list[str]]:
    """Return the kernel's table of `tcp` or `tcp6` sockets in this network namespace, split into columns."""
    return [line.split() for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]]

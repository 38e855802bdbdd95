"""Whose a connection to 127.0.0.1 is, as the kernel has it: all users of the node can make one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

LOCAL = "0100007F", "0000000000000000FFFF00000100007F"
"""127.0.0.1 as the kernel writes it, of a socket of IPv4, and of one of IPv6: torch connects with these."""
_NO_INODE = "0"
"""Of a socket that its process has closed. Its uid is not to be believed either: it is root's then."""


class FarSocket(NamedTuple):
    """The other end of a connection."""

    uid: int
    """Of the user who made it."""
    inode: str


def far_socket(port: int, to: int) -> FarSocket | None:
    """Find the socket at 127.0.0.1:port that is connected to 127.0.0.1:to; None once it is closed."""
    for family, local in zip(("tcp", "tcp6"), LOCAL, strict=True):
        ends = f"{local}:{port:04X}", f"{local}:{to:04X}"
        for row in rows(family):
            if (row[1], row[2]) == ends and row[9] != _NO_INODE:
                return FarSocket(int(row[7]), row[9])
    return None


def rows(family: str) -> list[list[str]]:
    """Read the kernel's table of sockets of this network, word by word: `tcp` or `tcp6`."""
    return [line.split() for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]]

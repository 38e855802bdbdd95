"""The node's own address and free ports on it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Mapping

_SIOCGIFADDR = 0x8915
_SEARCH = 200
"""Ports tried above a preferred one before giving up."""


class NetworkError(RuntimeError):
    """This node has no usable address, or no free port."""


def node_name() -> str:
    """The node's name as Slurm knows it; `local-<i>` for the i-th agent of the local executor."""
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
        return f"local-{os.environ['SUBMITIT_LOCAL_GLOBALID']}"
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(name: str, interface: str | None, addresses: Mapping[str, str]) -> str:
    """The address at which other nodes reach this one: the site's table, else the interface, else the name's address.

    Raises:
        NetworkError: none of them gives an address.
    """
    if name in addresses:
        return addresses[name]
    if interface:
        return interface_address(interface)
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise NetworkError(f"{name} does not resolve ({error}); set network.interface in the site file") from None


def interface_address(interface: str) -> str:
    """The IPv4 address of an interface.

    Raises:
        NetworkError: it has none, or there is no such interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise NetworkError(f"interface {interface} has no IPv4 address ({error.strerror})") from None
    return socket.inet_ntoa(packed[20:24])


def free_port(address: str, preferred: int, taken: Iterable[int]) -> int:
    """The first port from `preferred` on that is not `taken` and can be bound on `address` and on all addresses.

    Raises:
        NetworkError: none of the next ports is free.
    """
    busy = set(taken)
    for port in range(preferred, preferred + _SEARCH):
        if port in busy:
            continue
        if can_bind(address, port) and can_bind("", port):
            return port
    raise NetworkError(f"no free port on {address} from {preferred} to {preferred + _SEARCH - 1}")


def can_bind(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True

"""The node's own address and free ports on it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import random
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

_SIOCGIFADDR = 0x8915
_TCP, _TCP6 = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
_LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""
_SEARCH = 200
"""Ports tried above a preferred one, and then elsewhere, before giving up."""
_ELSEWHERE = range(10000, 32768)
"""Where nobody foresees what is taken; below what the kernel gives to connections."""


class NetworkError(RuntimeError):
    """This node has no usable address, or no free port."""


def node_name() -> str:
    """Find the node's name as Slurm knows it; `local-<i>` for the i-th agent of the local executor."""
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
        return f"local-{os.environ['SUBMITIT_LOCAL_GLOBALID']}"
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


_REMEDY = "give the nodes' addresses in network.addresses of the site file, or an interface in network.interface"


def own_address(name: str, interface: str | None, addresses: Mapping[str, str], alone: bool = False) -> str:
    """Find the address at which other nodes reach this one.

    Args:
        name: of the node; what it resolves to is the last resort.
        interface: whose address is taken if the table has none.
        addresses: the site's table, by name of the node. It is taken at its word.
        alone: whether the job has no other node, so that a loopback address will do.

    Raises:
        NetworkError: none of them gives an address that other nodes can reach.
    """
    if name in addresses:
        return addresses[name]
    if interface:
        address = interface_address(interface)
        if _is_reachable(address, alone):
            return address
        raise NetworkError(f"interface {interface} has the address {address}, which no other node can reach; {_REMEDY}")
    try:
        _, _, resolved = socket.gethostbyname_ex(name)
    except OSError as error:
        why = error.strerror or error
        raise NetworkError(f"the name {name} does not resolve ({why}); {_REMEDY}") from None
    # Debian's installer writes a line for 127.0.1.1 into /etc/hosts, beside which the real address may stand.
    found = next((address for address in resolved if _is_reachable(address, alone)), None)
    if found is None:
        told = ", ".join(resolved)
        raise NetworkError(f"{name} resolves to {told} on this node, which no other node can reach; {_REMEDY}")
    return found


def _is_reachable(address: str, alone: bool) -> bool:
    parsed = ipaddress.ip_address(address)
    if parsed.is_loopback:
        return alone
    return not (parsed.is_unspecified or parsed.is_link_local or parsed.is_multicast)


def interface_address(interface: str) -> str:
    """Find the IPv4 address of an interface.

    Raises:
        NetworkError: it has none, or there is no such interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise NetworkError(f"interface {interface} has no IPv4 address ({error.strerror})") from None
    return socket.inet_ntoa(packed[20:24])


class Ports:
    """Ports of one address that this process claims for servers that will listen there later.

    A claim is a Unix socket with an abstract name, which the kernel gives back when the process ends: runs that share a
    node and start at the same time see each other's. Anybody can make such claims, or listen on the ports themselves:
    who does so has others taken, elsewhere.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._claims: dict[int, socket.socket | None] = {}

    def claim(self, preferred: int) -> int:
        """Claim the first port from `preferred` on that is unclaimed and free, on this address and on all others.

        Raises:
            NetworkError: none of the next ports is free, nor any elsewhere.
        """
        for port in range(preferred, preferred + _SEARCH):
            if self._is_free(port) and self._claimed(port):
                return port
        for port in random.SystemRandom().sample(_ELSEWHERE, min(_SEARCH, len(_ELSEWHERE))):
            if port not in self._claims and self._is_free(port):
                if not self._claimed(port):
                    self._claims[port] = None  # somebody else's claim must not stop a run
                return port
        last = preferred + _SEARCH - 1
        raise NetworkError(f"no free port on {self._address} from {preferred} to {last}, nor elsewhere")

    def is_lost(self, port: int) -> bool:
        """Whether another user listens on a port that was claimed: a claim keeps only those away who ask for it."""
        return not self._is_free(port) and any(uid != os.geteuid() for uid in _listeners(self._address, port))

    def release(self) -> None:
        """Give all back."""
        for claim in self._claims.values():
            if claim is not None:
                claim.close()
        self._claims.clear()

    def _is_free(self, port: int) -> bool:
        return can_bind(self._address, port) and can_bind("", port)

    def _claimed(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0primeslurm {self._address}:{port}")
        except OSError:
            claim.close()
            return False
        self._claims[port] = claim
        return True


def _listeners(address: str, port: int) -> set[int]:
    """Find the users who listen on a port of an IPv4 address, or on it on all addresses."""
    own = struct.unpack("=I", socket.inet_aton(address))[0]
    found = set()
    for table, addresses in ((_TCP, {f"{own:08X}", "0" * 8}), (_TCP6, {"0" * 32})):
        if not table.exists():  # a kernel without IPv6 has no tcp6
            continue
        for line in table.read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            where, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port and where in addresses:
                found.add(int(uid))
    return found


def can_bind(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True

"""The address of this node, and free ports on it."""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

_TCP, _TCP6 = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
_LISTENS = "0A"  # state of a socket in /proc/net/tcp
# Ports tried above the preferred one, and then in _ELSEWHERE at random. That range is below the ports that the kernel
# gives to outgoing connections.
_TRIES = 200
_ELSEWHERE = range(10000, 32768)
_REMEDY = "give the nodes' addresses in network.addresses of the site file, or an interface in network.interface"
FIXED = "the recipe fixes it (router_port or backend_port of deployment.inference)"


class NetworkError(RuntimeError):
    """This node has no usable address, or no free port."""


def node_name() -> str:
    """Return the node's Slurm name, or `local-<i>` for the i-th agent of the local executor."""
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
        return f"local-{os.environ['SUBMITIT_LOCAL_GLOBALID']}"
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(name: str, interface: str | None, addresses: Mapping[str, str], alone: bool = False) -> str:
    """Return the address at which other nodes reach this one: from the site's table, the interface, or the node's name.

    If the job has no other node (`alone`), a loopback address will do.

    Raises:
        NetworkError: no such address can be reached by other nodes.
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
    # Debian's installer adds 127.0.1.1 to /etc/hosts. The real address may follow.
    reachable = next((address for address in resolved if _is_reachable(address, alone)), None)
    if reachable is None:
        text = ", ".join(resolved)
        raise NetworkError(f"{name} resolves to {text} on this node, which no other node can reach; {_REMEDY}")
    return reachable


def _is_reachable(address: str, alone: bool) -> bool:
    parsed = ipaddress.ip_address(address)
    if parsed.is_loopback:
        return alone
    return not (parsed.is_unspecified or parsed.is_link_local or parsed.is_multicast)


def interface_address(interface: str) -> str:
    """Return the IPv4 address of an interface. Raises NetworkError if there is none."""
    for address in psutil.net_if_addrs().get(interface, ()):
        if address.family == socket.AF_INET:
            return str(address.address)
    raise NetworkError(f"interface {interface} does not exist, or has no IPv4 address")


class Ports:
    """Claims ports of one address for servers that will listen there later.

    A claim is a Unix socket with an abstract name. Agents of other runs on the same node see it, and the kernel
    releases it when this process ends. Other users can also make such claims, or listen on a claimed port. Then another
    port is used.

    Args:
        fixed: numbers that processes of the run must have. No other process gets one of them.
    """

    def __init__(self, address: str, fixed: Collection[int] = ()) -> None:
        self._address, self._fixed = address, fixed
        self._claims: dict[int, socket.socket | None] = {}

    def claim(self, preferred: int, *, fixed: bool = False) -> int:
        """Claim the first port from `preferred` on that is free on all addresses. `fixed`: only `preferred` will do.

        Raises:
            NetworkError: the next ports and some random ones are all taken, or the fixed port is.
        """
        if fixed:
            # Nodes of an emulated cluster differ in their addresses only, so others may have the same fixed port.
            if not can_bind(self._address, preferred) or not self._claim(preferred):
                raise NetworkError(f"port {preferred} of {self._address} is in use, and {FIXED}")
            return preferred
        for port in range(preferred, preferred + _TRIES):
            if self._may_claim(port) and self._claim(port):
                return port
        for port in random.SystemRandom().sample(_ELSEWHERE, min(_TRIES, len(_ELSEWHERE))):
            if self._may_claim(port):
                if not self._claim(port):
                    self._claims[port] = None  # claims of another user must not keep a run from starting
                return port
        last = preferred + _TRIES - 1
        raise NetworkError(f"no free port on {self._address} from {preferred} to {last}, nor elsewhere")

    def is_lost(self, port: int) -> bool:
        return not self._is_free(port) and any(uid != os.geteuid() for uid in _listeners(self._address, port))

    def release(self) -> None:
        for claim in self._claims.values():
            if claim is not None:
                claim.close()
        self._claims.clear()

    def _may_claim(self, port: int) -> bool:
        return port not in self._fixed and port not in self._claims and self._is_free(port)

    def _is_free(self, port: int) -> bool:
        return can_bind(self._address, port) and can_bind("", port)

    def _claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0primeslurm {self._address}:{port}")
        except OSError:
            claim.close()
            return False
        self._claims[port] = claim
        return True


def _listeners(address: str, port: int) -> set[int]:
    """Return the user ids that listen on a port, on this IPv4 address or on all addresses."""
    packed = struct.unpack("=I", socket.inet_aton(address))[0]
    users = set()
    for table, addresses in ((_TCP, {f"{packed:08X}", "0" * 8}), (_TCP6, {"0" * 32})):
        if not table.exists():  # a kernel without IPv6 has no tcp6
            continue
        for line in table.read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            where, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port and where in addresses:
                users.add(int(uid))
    return users


def can_bind(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True

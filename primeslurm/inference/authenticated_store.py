"""Protects torch's TCPStore in expert-parallel engines with the run's secret.

Ranks find each other through these stores, which accept any client on all addresses. A stranger who writes into one
could pose as a rank, and ranks unpickle what other ranks send.
"""

from __future__ import annotations

import socket
import sys
from datetime import timedelta

import torch.distributed as dist

from primeslurm.inference import patches
from primeslurm.wire.transport import rendezvous
from primeslurm.wire.transport.rendezvous_store import serve_store

# torch's own default
_TIMEOUT = timedelta(seconds=300)
# Stores that this process serves. They must live until the process ends.
_stores: list[dist.TCPStore] = []


class AuthenticatedStore(dist.TCPStore):
    """Replaces torch's TCPStore: a client that reaches the store through an authenticating gate at `port`."""

    # The rank with `is_master` also serves the store and the gate. Arguments that are not used below have no effect.

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = _TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        self._gate = port
        if is_master:
            gate = _listening(host_name, port, master_listen_fd)
            self._gate = int(gate.getsockname()[1]) if gate else port
            _stores.append(serve_store(host_name, self._gate, gate))
        local_port = rendezvous.tunnel(host_name, self._gate, timeout.total_seconds())
        super().__init__("127.0.0.1", local_port, world_size, False, timeout, False)

    @property
    def port(self) -> int:
        """Port of the authenticating gate, which other ranks connect to."""
        return self._gate


def _listening(host: str, port: int, fd: int | None) -> socket.socket | None:
    """Return the gate's listening socket: the given one, or one at a free port. None if the port is fixed."""
    if fd is not None:
        return socket.socket(fileno=fd)
    return None if port else socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def use() -> None:
    """Make vLLM and torch use `AuthenticatedStore` in this process. Raise RuntimeError if vLLM's code has changed."""
    from vllm.distributed import utils

    patches.expect(utils, "create_tcp_store", ["host", "port", "listen_socket"])
    utils.TCPStore = AuthenticatedStore
    sys.modules["torch.distributed.rendezvous"].TCPStore = AuthenticatedStore  # type: ignore[attr-defined]

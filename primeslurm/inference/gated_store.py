"""torch's store in engines that share their experts, for those alone who have the run's secret.

Their ranks meet in stores of torch, which serve whoever reaches their ports, on all addresses, and tell each rank where
the others are. Who writes into one can be a rank to the others, which unpickle what ranks send.
"""

from __future__ import annotations

import socket
import sys
from datetime import timedelta

import torch.distributed as dist

from primeslurm.inference import guards
from primeslurm.wire.transport import rendezvous
from primeslurm.wire.transport.rendezvous_store import serve_store

_TIMEOUT = timedelta(seconds=300)
"""As torch has it."""
_stores: list[dist.TCPStore] = []
"""Those that this process serves, until its end: ranks of its groups use them that long."""


class GatedStore(dist.TCPStore):
    """A store's client, behind a passage and a gate, where torch makes a store or a client of one.

    The rank that serves the store is a client like the others: NCCL's groups clone their stores, which connects anew.

    Args:
        host_name: where the gate is.
        port: of the gate; 0, for one that is free.
        world_size: see torch.
        is_master: serve the store, and open the gate.
        timeout: longest wait for the store.
        wait_for_workers: nobody waits for others here: they cannot come before there is a gate.
        multi_tenant: has no effect, each is a store of its own.
        master_listen_fd: the gate's, which listens.
        use_libuv: has no effect.

    Raises:
        OSError: the port is taken.
        RendezvousError: somebody else was connected to the store already.
    """

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
        way = rendezvous.tunnel(host_name, self._gate, timeout.total_seconds())
        super().__init__("127.0.0.1", way, world_size, False, timeout, False)

    @property
    def port(self) -> int:
        """Return where others find it: the gate's port."""
        return self._gate


def _listening(host: str, port: int, fd: int | None) -> socket.socket | None:
    """Return the socket that a gate is to listen at, if there is one already, or if any port will do."""
    if fd is not None:
        return socket.socket(fileno=fd)
    return None if port else socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def use() -> None:
    """Have vLLM and torch make gated stores in this process.

    Raises:
        RuntimeError: vLLM is not the version that this was written for.
    """
    from vllm.distributed import utils

    guards.expect(utils, "create_tcp_store", ["host", "port", "listen_socket"])
    utils.TCPStore = GatedStore
    sys.modules["torch.distributed.rendezvous"].TCPStore = GatedStore  # type: ignore[attr-defined]

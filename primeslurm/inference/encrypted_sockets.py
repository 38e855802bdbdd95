"""Encrypts vLLM's ZMQ sockets between nodes (of data-parallel ranks, of NIXL) with keys from the run's secret."""

# Without this, any process that reaches such a socket can act as an engine, and an invalid message kills the
# coordinator of a data-parallel group.

from __future__ import annotations

import functools
import sys
from typing import Any

import zmq
from zmq.utils import z85

from primeslurm.inference import patches
from primeslurm.wire.transport.secret import key_for

# Socket types that connect if vLLM does not say whether to bind or connect.
_CONNECT = (zmq.PUSH, zmq.SUB, zmq.XSUB)


@functools.cache
def _keys() -> tuple[bytes, bytes]:
    """Return the public and the private CURVE key, which all engines of a run share."""
    private = z85.encode(key_for(b"engines"))
    return zmq.curve_public(private), private


class EncryptedContext:
    """Wraps a ZMQ context, so that its sockets are encrypted. `serves`: they bind rather than connect."""

    def __init__(self, context: Any, serves: bool) -> None:
        self._context, self._serves = context, serves

    def socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        # CURVE rejects clients that do not know the server's public key. Password authentication would need a thread
        # per ZMQ context, and vLLM ends contexts at any time.
        socket.curve_publickey, socket.curve_secretkey = _keys()
        if self._serves:
            socket.curve_server = True
        else:
            socket.curve_serverkey = _keys()[0]
        return socket


def use() -> None:
    """Make vLLM encrypt all TCP sockets of this process. Raise RuntimeError if vLLM's code has changed."""
    from vllm.utils import network_utils

    make = patches.expect(network_utils, "make_zmq_socket", ["ctx", "path", "socket_type", "bind"])

    @functools.wraps(make)
    def gated(ctx: Any, path: str, socket_type: int, bind: bool | None = None, *rest: Any, **others: Any) -> Any:
        if path.startswith("tcp://"):
            ctx = EncryptedContext(ctx, socket_type not in _CONNECT if bind is None else bind)
        return make(ctx, path, socket_type, bind, *rest, **others)

    # Many modules have imported the function by name. `vars` avoids triggering modules that import lazily.
    for module in list(sys.modules.values()):
        if vars(module).get("make_zmq_socket") is make:
            vars(module)["make_zmq_socket"] = gated

"""vLLM's ZMQ sockets between nodes (ranks of a group, NIXL's side channel), for those alone who have the run's secret.

Whoever reaches one of vLLM's can speak as an engine, and a message that is none ends the coordinator of a group, which
then stands still. Here they are encrypted (CURVE), by keys that the secret gives: who does not know the public one
cannot begin a handshake. A password would need a thread of each context to look at it, and vLLM ends contexts at will.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import zmq
from zmq.utils import z85

from primeslurm.inference import guards
from primeslurm.wire.transport.secret import key_for

_CONNECT = (zmq.PUSH, zmq.SUB, zmq.XSUB)
"""Kinds of sockets that connect if vLLM does not say what they do."""


@functools.cache
def _keys() -> tuple[bytes, bytes]:
    """The public and the private one of this run's engines."""
    private = z85.encode(key_for(b"engines"))
    return zmq.curve_public(private), private


class GatedContext:
    """A context of ZMQ, in whose place its sockets are made.

    Args:
        context: vLLM's.
        serves: they are to be bound, and not connected.
    """

    def __init__(self, context: Any, serves: bool) -> None:
        self._context, self._serves = context, serves

    def socket(self, kind: int) -> Any:
        """Make a socket that asks for the secret, or shows it."""
        found = self._context.socket(kind)
        found.curve_publickey, found.curve_secretkey = _keys()
        if self._serves:
            found.curve_server = True
        else:
            found.curve_serverkey = _keys()[0]
        return found


def use() -> None:
    """Have vLLM make such sockets in this process, wherever they are for TCP.

    Raises:
        RuntimeError: vLLM is not the version that this was written for.
    """
    from vllm.utils import network_utils

    make = guards.expect(network_utils, "make_zmq_socket", ["ctx", "path", "socket_type", "bind"])

    @functools.wraps(make)
    def gated(ctx: Any, path: str, socket_type: int, bind: bool | None = None, *rest: Any, **others: Any) -> Any:
        if path.startswith("tcp://"):
            ctx = GatedContext(ctx, socket_type not in _CONNECT if bind is None else bind)
        return make(ctx, path, socket_type, bind, *rest, **others)

    for module in list(sys.modules.values()):  # many have imported it by now
        if vars(module).get("make_zmq_socket") is make:  # without asking modules that import what they are asked for
            vars(module)["make_zmq_socket"] = gated

"""Messages of a program in a sandbox that poses as the sandbox's init process."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.orchestrator.environments.sandbox.bwrap_sandbox import Sandbox
from primeslurm.orchestrator.environments.sandbox.limits import SandboxLimits
from primeslurm.orchestrator.environments.sandbox.port_forwarding import SandboxGoneError
from tests.unit.fuzz.mutations import fuzzed, texts, trees

ANSWERS = (
    {"type": "answered", "id": 1, "pid": 7, "error": ""},
    {"type": "exited", "pid": 7, "code": 0},
    {"type": "ready"},
)


class Reading(Sandbox):
    """A sandbox around one end of a socket, whose other end sends arbitrary data."""

    def __init__(self) -> None:
        super().__init__(SandboxLimits(), [], [])
        self._control, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self.ended = False

    def kill(self, why: str) -> None:
        """Record the reason. There is no process."""
        self.ended = True

    async def hear(self, packet: bytes) -> None:
        """Read one packet as the worker's loop does."""
        loop = asyncio.get_running_loop()
        wrong: list[Any] = []
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        assert self._control is not None
        loop.add_reader(self._control, self._read)
        self.theirs.send(packet)
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        if self._control is not None:
            loop.remove_reader(self._control)
            self._control.close()
        self.theirs.close()
        assert not wrong, wrong


WRONG = [
    b"[" * 4000,
    b"\xff",
    b"1",
    b'{"type":"exited","pid":1e999,"code":0}',
    b'{"type":"exited","pid":7,"code":' + b"9" * 3000 + b"}",
    b'{"type":"answered","id":NaN}',
    b'{"type":"answered","id":5}',
    b'{"type":"ready","and":' + b"[" * 3000,
]


@pytest.mark.parametrize("packet", WRONG)
async def test_invalid_response_ends_the_sandbox(packet: bytes) -> None:
    sandbox = Reading()
    await sandbox.hear(packet)
    assert sandbox.ended


@fuzzed(2)
@given(
    st.sampled_from(ANSWERS).flatmap(
        lambda answer: (
            trees(answer).map(lambda tree: json.dumps(tree, default=str).encode()[:4000])
            | texts(json.dumps(answer).encode())
        )
    )
)
def test_sandbox_reader_handles_any_message(packet: bytes) -> None:
    async def hear() -> None:
        sandbox = Reading()
        pending = sandbox._pending[1] = asyncio.get_running_loop().create_future()
        await sandbox.hear(packet[:4000] or b"x")
        if pending.done() and isinstance(pending.exception(), SandboxGoneError):
            return

    asyncio.run(hear())

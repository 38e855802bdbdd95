"""Messages that another user of a node may send to the ports of a run, and the responses.

ports = ports_of(run)
answers = attempted(lambda: send_all(ports)).value
with stranger(lambda: half_open(ports)): ...  # connections that begin a message and never end it
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import resource
import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import psutil

from primeslurm.node.head.exporter import TARGETS_FILE
from primeslurm.run.directory import RunDirectory
from primeslurm.wire.batches.batch import RankShard
from primeslurm.wire.link.messages import GetBatch

WRONG = "0" * 64
"""Has the form of a run's secret."""
FLOOD = 100
"""Connections per port."""
TIMEOUT_S = 10.0
"""Longest wait for a response [s]. A closed connection counts as a response."""
_NAMED_MECHANISM = slice(12, 32)
_GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


@dataclass(frozen=True)
class Port:
    """A TCP port on which a process listens."""

    owner: str
    """Process and port name of the plan, such as `router-0/http`; `?` for a port outside the plan."""
    host: str
    port: int


def role(owner: str) -> str:
    """Remove the numbers: `decode-r0-1/http` becomes `decode/http`."""
    return re.sub(r"-r?\d+", "", owner)


def ports_of(run: RunDirectory) -> list[Port]:
    """Return all ports on which processes of the newest attempt listen, including agents and child processes."""
    owners, names = {}, {}
    for report in run.latest().heartbeats():
        owners[report.agent_pid] = f"agent-{report.rank}"
        owners |= {process.pid: name for name, process in report.processes.items() if process.pid}
        for name, ports in report.ports.items():
            names |= {(report.address, port): f"{name}/{port_name}" for port_name, port in ports.items()}
    for target in json.loads((run.path / TARGETS_FILE).read_text()):
        if target["labels"]["role"] == "head":
            host, port = target["targets"][0].rsplit(":", 1)
            names[host, int(port)] = "head/metrics"
    listening = set()
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.pid and (owner := _owner(each.pid, owners)):
            at = (each.laddr.ip, each.laddr.port)
            listening.add(Port(names.get(at, f"{owner}/?"), *at))
    return sorted(listening, key=lambda each: (each.owner, each.port))


class Response(NamedTuple):
    port: str
    message: str
    description: str
    """Description of the response."""
    text: str


def send_all(ports: list[Port], timeout_s: float = TIMEOUT_S) -> list[Response]:
    """Send every message to every port, all at the same time."""
    _many_connections()
    return asyncio.run(_send_all(ports, timeout_s))


def half_open(ports: list[Port]) -> int:
    """Open FLOOD connections to each port, begin a message on each, and keep them open. Return their number."""
    _many_connections()
    for number in range(FLOOD):
        for port in ports:
            with contextlib.suppress(OSError):
                client = socket.socket()  # `create_connection` loads files that a stranger may not read
                client.settimeout(30)
                client.connect((port.host, port.port))
                client.sendall(_BEGUN[number % len(_BEGUN)])
                _kept.append(client)
    return len(_kept)


def describe(answer: bytes) -> str:
    """Describe a response: `HTTP 401`, `ZMTP CURVE`, `64 bytes`, `nothing`."""
    if not answer:
        return "nothing"
    if answer.startswith(b"HTTP/1."):
        return f"HTTP {answer[9:12].decode(errors='replace')}"
    if answer.startswith(_SIGNATURE[:1]) and answer[9:10] == _SIGNATURE[9:]:
        mechanism = answer[_NAMED_MECHANISM].rstrip(b"\0").decode(errors="replace")
        commands = re.findall(rb"READY|WELCOME|ERROR", answer[_GREETING_BYTES:])
        return " ".join(["ZMTP", *filter(None, [mechanism]), *(each.decode() for each in commands)])
    return f"{len(answer)} bytes"


_kept: list[socket.socket] = []


def _owner(pid: int, owners: dict[int, str]) -> str:
    """Return the process of the run that `pid` is or descends from."""
    with contextlib.suppress(psutil.Error):
        for each in [psutil.Process(pid), *psutil.Process(pid).parents()]:
            if each.pid in owners:
                return owners[each.pid]
    return ""


def _many_connections() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _send_all(ports: list[Port], timeout_s: float) -> list[Response]:
    return await asyncio.gather(*(_exchange(port, name, timeout_s) for name in MESSAGES for port in ports))


async def _exchange(port: Port, name: str, timeout_s: float) -> Response:
    answer, writer = bytearray(), None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(port.host, port.port)
            first, then = MESSAGES[name], b""
            if first.startswith(_SIGNATURE):  # ZMQ disconnects from a client that does not wait for its greeting
                first, then = first[:_GREETING_BYTES], first[_GREETING_BYTES:]
            writer.write(first)
            while part := await reader.read(65536):
                answer += part
                if len(answer) >= _GREETING_BYTES and then:
                    writer.write(then)
                    then = b""
    except OSError:  # includes a time-out
        pass
    if writer is None:
        return Response(port.owner, name, "no connection", "")
    writer.close()
    return Response(port.owner, name, describe(bytes(answer)), answer.decode(errors="replace"))


def _http(method: str, path: str, body: object = None, token: str = "") -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n{shown}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _short(*parts: bytes) -> bytes:
    """Return strings with length prefixes of one byte."""
    return b"".join(bytes([len(part)]) + part for part in parts)


def _zmtp(mechanism: bytes, command: bytes) -> bytes:
    """Return the bytes of a ZMQ client that sends everything at once, and then requests the batch of step 1."""
    greeting = _SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    frames = b"\x01\x00" + b"\x00" + _short(ASKED)  # an empty frame with more to follow, and the last frame
    return greeting + b"\x04" + _short(command) + frames


def _ready() -> bytes:
    return _short(b"READY", b"Socket-Type") + struct.pack(">I", 6) + b"DEALER"


def _hello() -> bytes:
    """Return CURVE's HELLO with a box that no server can open: version, padding, client key, nonce and box."""
    return _short(b"HELLO") + b"\x01\x00" + bytes(72) + random.Random(12).randbytes(32 + 8 + 80)


def _store() -> bytes:
    """Return the bytes of torch's store client: VALIDATE, SET, GETNUMKEYS."""
    key, value = b"/theirs", b"theirs"
    sets = b"\x01" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", len(value)) + value
    return b"\x00" + struct.pack("<I", 0x3C85F7CE) + sets + b"\x07"


ASKED = msgspec.msgpack.encode(GetBatch(1, RankShard(0, 1)))
_TOKENS = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 4, "token_ids": [1, 2, 3], "sampling_params": {}}
MESSAGES = {
    "garbage": random.Random(11).randbytes(4096),
    "a store's client": _store(),
    "a client of ZMQ": _zmtp(b"NULL", _ready()),
    "one with a wrong key": _zmtp(b"CURVE", _hello()),
    "a request for tokens": _http("POST", "/v1/completions", _TOKENS),
    "one with a wrong secret": _http("POST", "/inference/v1/generate", _TOKENS, WRONG),
    "another policy": _http("POST", "/update_weights", {"update_info": {"version": 9, "path": "/tmp"}}, WRONG),
    "pause": _http("POST", "/pause", {}),
    "an end": _http("POST", "/emulated/hang", {}, WRONG),
    "one worker less": _http("POST", "/remove_worker?url=http://127.0.0.1:1", {}, WRONG),
    "who works": _http("GET", "/list_workers"),
    "which models": _http("GET", "/v1/models"),
}
"""Plausible messages for each kind of port, and garbage. None has the secret."""
_BEGUN = (MESSAGES["a request for tokens"][:-5], MESSAGES["which models"][:20], MESSAGES["a client of ZMQ"][:30], b"")

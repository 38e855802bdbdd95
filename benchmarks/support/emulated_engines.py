"""Engines with a simulated clock behind a real router: HTTP requests and KV events are real, and seconds simulated.

The clock stands still while a message is on its way, so the speed of this machine does not change results. KV transfer
from prefill to decode engines takes no time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from benchmarks.support.ports import HOST, free_port
from benchmarks.support.simulated_engine import SimulatedEngine, Turn
from primeslurm.plan.commands import kv_events
from primeslurm.wire.names import GENERATE, SERVED_MODEL

# Step of the clock [s], and so the error of a latency.
TICK_S = 0.2
# Real time that a message may take [s].
MESSAGE_S = 60.0
BLOCK = kv_events.BLOCK_SIZE
PORTS = ("http", kv_events.EVENTS, kv_events.REPLAY)


class SimulatedTime:
    """A clock that only advances while all coroutines wait for it.

    `move` changes the number of messages on their way and of running coroutines.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._moving = 0
        self._still = asyncio.Event()
        self._sleeping: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def move(self, change: int) -> None:
        self._moving += change
        if self._moving:
            self._still.clear()
        else:
            self._still.set()

    async def wake(self, future: asyncio.Future[Any], result: Any = None) -> None:
        """Resume the coroutine that awaits `future`, and wait until nothing moves."""
        self.move(1)
        future.set_result(result)
        await self.still()

    async def still(self) -> None:
        await asyncio.wait_for(self._still.wait(), MESSAGE_S)

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleeping, (self.now + seconds, next(self._order), future))
        self.move(-1)
        await future

    async def advance(self, seconds: float) -> None:
        self.now += seconds
        while self._sleeping and self._sleeping[0][0] <= self.now:
            await self.wake(heapq.heappop(self._sleeping)[2])


class _Sampling(msgspec.Struct):
    max_tokens: int


class EmulatedRequest(msgspec.Struct):
    """A generate request. `rollout` and `group` name its tokens after and before position `shared`."""

    token_ids: list[int]
    sampling_params: _Sampling
    rollout: str
    group: str
    shared: int


class EmulatedEngine:
    """A simulated engine, its waiting requests, and the KV events of its blocks.

    Args:
        port: Port of its KV events; None to publish none.
        transferred: Whether other engines have computed its prompts.
    """

    def __init__(self, simulated: SimulatedEngine, port: int | None, transferred: bool) -> None:
        self.simulated = simulated
        self._transferred = transferred
        self._answers: dict[str, asyncio.Future[bytes]] = {}
        self._sampled: dict[str, list[int]] = {}
        self._parents: dict[str, tuple[str, int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._published: dict[str, int] = {}
        self._messages = itertools.count()
        self._socket = None
        if port:
            self._socket = zmq.asyncio.Context.instance().socket(zmq.XPUB, socket_class=zmq.asyncio.Socket)
            self._socket.sndhwm = 0
            self._socket.bind(f"tcp://{HOST}:{port}")

    async def subscribed(self) -> None:
        """Wait until a router reads the events. A router that missed the first ones does not trust the others."""
        if self._socket:
            await asyncio.wait_for(self._socket.recv(), MESSAGE_S)

    def add(self, request: EmulatedRequest) -> asyncio.Future[bytes]:
        """Add a request, and return its future answer."""
        prompt, target, shared = request.token_ids, request.sampling_params.max_tokens, request.shared
        draw = random.Random(f"{request.rollout}.{len(prompt)}")
        sampled = list(draw.randbytes(target))
        self._tokens[request.group], self._tokens[request.rollout] = prompt[:shared], prompt[shared:] + sampled
        self._parents[request.rollout] = (request.group, shared // BLOCK - 1)
        turn = Turn(request.rollout, request.group, shared, len(prompt), target, transferred=self._transferred)
        self.simulated.add(turn)
        self._sampled[request.rollout] = sampled
        self._answers[request.rollout] = future = asyncio.get_running_loop().create_future()
        return future

    async def advance(self, seconds: float, time: SimulatedTime) -> None:
        finished = self.simulated.advance(seconds)
        await self._publish()
        for turn in finished:
            await time.wake(self._answers.pop(turn.job), _answer(self._sampled.pop(turn.job)))

    async def close(self) -> None:
        if self._socket:
            self._socket.close(0)

    async def _publish(self) -> None:
        """Publish changes of cached blocks since the last call."""
        if not self._socket:
            return
        blocks = {name: tokens // BLOCK for name, tokens in self.simulated.cached_tokens().items() if tokens >= BLOCK}
        changed = {name for name, _ in blocks.items() ^ self._published.items()}
        removed, stored = list[dict[str, Any]](), list[dict[str, Any]]()
        # A group's blocks come before those of its rollouts, their children.
        for name in sorted(changed, key=lambda name: (name in self._parents, name)):
            old, new = self._published.get(name, 0), blocks.get(name, 0)
            hashes = [_block_hash(name, number) for number in range(min(old, new), max(old, new))]
            event = {"block_hashes": hashes, "medium": "GPU"}
            if new < old:
                removed.append(event | {"type": "BlockRemoved"})
                continue
            parent = (name, old - 1) if old else self._parents.get(name)
            event |= {"parent_block_hash": _block_hash(*parent) if parent else None, "block_size": BLOCK}
            event |= {"token_ids": self._tokens[name][old * BLOCK : new * BLOCK], "lora_id": None, "lora_name": None}
            stored.append(event | {"type": "BlockStored"})
        self._published = blocks
        if removed or stored:
            batch, number = msgspec.msgpack.encode([0.0, removed + stored, 0]), next(self._messages)
            await self._socket.send_multipart([b"", number.to_bytes(8, "big"), batch])


class EmulatedEngines:
    """Engines of one replica, by name, and their HTTP servers."""

    def __init__(self, engines: Mapping[str, SimulatedEngine], prefill: Sequence[str], kv_aware: bool) -> None:
        self.time = SimulatedTime()
        self._ports = {name: [free_port() for _ in PORTS] for name in engines}
        self._engines = dict[str, EmulatedEngine]()
        for name, engine in engines.items():
            decodes = bool(prefill) and name not in prefill
            port = self._ports[name][1] if kv_aware and not decodes else None
            self._engines[name] = EmulatedEngine(engine, port, transferred=decodes)
        self._by_port = {self._ports[name][0]: name for name in engines}
        self._runner: web.AppRunner | None = None

    @property
    def addresses(self) -> dict[str, str]:
        """Placeholders of a router's command line."""
        return {
            f"addr:{name}:{port}": f"{HOST}:{number}"
            for name, numbers in self._ports.items()
            for port, number in zip(PORTS, numbers, strict=True)
        }

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post(GENERATE, self._generate)
        app.router.add_get("/{path:.*}", self._describe)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        for port in self._by_port:
            await web.TCPSite(self._runner, HOST, port).start()

    async def subscribed(self) -> None:
        await asyncio.gather(*(engine.subscribed() for engine in self._engines.values()))

    async def tick(self) -> None:
        await self.time.advance(TICK_S)
        for engine in self._engines.values():
            await engine.advance(TICK_S, self.time)

    async def stop(self) -> None:
        for engine in self._engines.values():
            await engine.close()
        if self._runner:
            await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=EmulatedRequest)
        answer = self._engines[self._name(request)].add(body)
        self.time.move(-1)
        return web.Response(body=await answer, content_type="application/json")

    async def _describe(self, request: web.Request) -> web.Response:
        """Answer health checks, and a router's questions to prefill engines about their KV events."""
        source = {"publisher": "zmq", "endpoint": f"tcp://{HOST}:{self._ports[self._name(request)][1]}"}
        config = {"model_config": {"model": SERVED_MODEL}, "cache_config": {"block_size": BLOCK}}
        answers: dict[str, Any] = {
            "kv_event_sources": {"0": source | {"enable_kv_cache_events": True}},
            "server_info": {"vllm_config": config},
            "v1/models": {"data": [{"id": SERVED_MODEL}]},
        }
        return web.json_response(answers.get(request.match_info["path"], {}))

    def _name(self, request: web.Request) -> str:
        assert request.transport
        return self._by_port[request.transport.get_extra_info("sockname")[1]]


def _block_hash(name: str, number: int) -> int:
    return zlib.crc32(name.encode()) << 20 | number


def _answer(token_ids: list[int]) -> bytes:
    """Return the answer of an engine. From prefill engines, the router needs the parameters of a transfer."""
    choice = {
        "token_ids": token_ids,
        "logprobs": {"content": [{"logprob": -1.0}] * len(token_ids)},
        "weight_versions": [{"version": "default", "start": 0, "end": len(token_ids)}],
        "finish_reason": "length",
    }
    return msgspec.json.encode({"choices": [choice], "kv_transfer_params": {"do_remote_prefill": True}})

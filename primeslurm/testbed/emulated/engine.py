"""Emulated vLLM server: `python -m primeslurm.testbed.emulated.engine` with vLLM's command line.

It serves the routes that the orchestrator, vllm-router and rollouts use, behind the real version gate. It ignores
options that do not concern it. For tests, `POST /emulated/hang` makes the server hang, and `POST /emulated/hang_core`
makes only the engine core hang.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from primeslurm.base import files
from primeslurm.inference.auth import App, Receive, Scope, SecretGate, Send
from primeslurm.inference.version_gate import VersionGate
from primeslurm.testbed.emulated import http_server
from primeslurm.testbed.emulated.scheduler import PREFILL_TOKENS_PER_S, Request, Scheduler, exposition
from primeslurm.wire.decoding import DamagedError, decode_json

# Time between two turns of the scheduler [s], short compared with a request.
TICK_S = 0.1
KV_BLOCKS = 2048
MAX_RUNNING = 64
# Tokens per step at which prefill reaches its full speed. It is proportionally slower with fewer.
BATCHED_TOKENS = 8192
VOCABULARY = 1000
EOS = 2
# Median length of a completion (log-normal with sigma 1).
MEAN_ANSWER_TOKENS = 24.0
HANG_PATH = "/emulated/hang"
# Routes that are accepted and do nothing.
NO_EFFECT = (
    ("GET", "/health"),
    *(("POST", path) for path in ("/init_weight_transfer_engine", "/start_weight_update", "/reset_encoder_cache")),
)
# Routes that vLLM's server answers without its core.
SERVERS_OWN = ("/health", "/metrics", "/v1/models")
# Duration of a weight update [s].
UPDATE_S = 0.1

Query = dict[str, list[str]]


class SamplingParameters(msgspec.Struct, frozen=True):
    """The sampling parameters that the emulation uses."""

    max_tokens: int | None = None
    ignore_eos: bool = False


class KvTransfer(msgspec.Struct, frozen=True):
    """Whether a prefill engine computed the prompt, and whether a decode engine will sample the tokens."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False


class WeightUpdate(msgspec.Struct, frozen=True):
    """The source of new weights: a directory, or a session in which the trainer sends them."""

    version: int = 0
    path: str = ""
    session: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Body(msgspec.Struct, frozen=True):
    """The fields of a request body that any route reads. Other fields are ignored."""

    token_ids: list[int] = []
    sampling_params: SamplingParameters = SamplingParameters()
    cache_salt: str | None = None
    kv_transfer_params: KvTransfer | None = None
    prompt: list[int] = []
    update_info: WeightUpdate = WeightUpdate()
    weight_version: str | int | None = None
    new_version: str | int = ""


class EmulatedEngine:
    """The ASGI application behind the version gate.

    Args:
        batched_tokens: most tokens in a step of the real engine.
    """

    def __init__(
        self,
        served: str,
        max_len: int,
        blocks: int = KV_BLOCKS,
        seed: int = 0,
        batched_tokens: int = BATCHED_TOKENS,
        tick_s: float = TICK_S,
    ) -> None:
        self._served = served
        self._max_len = max_len
        self._tick_s = tick_s
        self._random = random.Random(seed)
        speed = PREFILL_TOKENS_PER_S * min(1.0, batched_tokens / BATCHED_TOKENS)
        self._scheduler = Scheduler(max(blocks, max_len // 16 + 2), MAX_RUNNING, speed)
        self._waiters: dict[Request, asyncio.Future[None]] = {}
        self._work = asyncio.Event()
        self._paused = False
        self._core_hangs = False
        self._id = uuid.uuid4().hex

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        if self._core_hangs and scope["path"] not in SERVERS_OWN:
            await asyncio.Event().wait()
        try:
            decoded = decode_json(body or b"{}", Body)
        except DamagedError as error:
            await http_server.answer(send, 400, {"error": str(error)})
            return
        query = parse_qs(scope["query_string"].decode())
        await http_server.answer(send, *await self._respond(scope["method"], scope["path"], decoded, query))

    async def _respond(self, method: str, path: str, body: Body, query: Query) -> tuple[int, object]:
        match method, path:
            case "POST", "/inference/v1/generate":
                return await self._generate(body)
            case "POST", "/v1/completions":
                return await self._complete(body)
            case "POST", "/update_weights":
                return await self._update_weights(body)
            case "GET", "/metrics":
                return 200, exposition(self._scheduler)
            case "GET", "/v1/models":
                model = {"id": self._served, "object": "model", "owned_by": "emulated"}
                return 200, {"object": "list", "data": [model]}
            case "GET", "/is_paused":
                return 200, {"is_paused": self._paused}
            case "POST", "/pause":
                self._paused = True
                if query.get("clear_cache", ["true"]) == ["true"]:
                    self._scheduler.clear_cache()
            case "POST", "/resume":
                self._paused = False
            case "POST", "/finish_weight_update":
                self._scheduler.version = str(body.weight_version or "default")
            case "POST", "/update_weight_version":
                self._scheduler.version = str(body.new_version)
            case "POST", "/emulated/hang_core":
                self._core_hangs = True
            case _ if (method, path) not in NO_EFFECT:
                return 404, {"detail": "Not Found"}
        return 200, {}

    async def run(self) -> None:
        """Advance the scheduler until cancelled."""
        while True:
            await self._work.wait()
            before = time.monotonic()
            await asyncio.sleep(self._tick_s)
            stopped = self._paused or self._core_hangs
            for request in self._scheduler.advance(0.0 if stopped else time.monotonic() - before):
                waiter = self._waiters.pop(request)
                if not waiter.done():  # its client may have disconnected in the same turn of the event loop
                    waiter.set_result(None)
            if not self._scheduler.busy:
                self._work.clear()

    async def _generate(self, body: Body) -> tuple[int, object]:
        prompt, sampling = body.token_ids, body.sampling_params
        room = self._max_len - len(prompt)
        if room < 1:
            return 400, {"error": f"a prompt of {len(prompt)} tokens does not fit in {self._max_len}"}
        limit = min(sampling.max_tokens or room, room)
        transfer = body.kv_transfer_params or KvTransfer()
        drawn = max(1, round(MEAN_ANSWER_TOKENS * self._random.lognormvariate(0.0, 1.0)))
        target = limit if sampling.ignore_eos else min(drawn, limit)
        request = Request(prompt, body.cache_salt or "", target, transfer.do_remote_prefill)
        await self._finish(request)
        tokens = [self._random.randrange(EOS + 1, VOCABULARY) for _ in range(target)]
        if target < limit:
            tokens[-1] = EOS
        self._scheduler.finished(request, tokens)
        answer = self._answer(request, tokens, "stop" if target < limit else "length")
        if transfer.do_remote_decode:
            answer["kv_transfer_params"] = self._kv_transfer(request)
        return 200, answer

    async def _complete(self, body: Body) -> tuple[int, object]:
        """Act as a teacher: return random log-probabilities of the prompt."""
        prompt = body.prompt
        if len(prompt) >= self._max_len:
            return 400, {"error": f"a prompt of {len(prompt)} tokens does not fit in {self._max_len}"}
        await self._finish(Request(prompt, "", 1))
        logprobs = [{str(token): {"logprob": -self._random.expovariate(1.0), "rank": 1}} for token in prompt[1:]]
        return 200, {"choices": [{"index": 0, "text": "", "prompt_logprobs": [None, *logprobs]}]}

    async def _finish(self, request: Request) -> None:
        done = asyncio.get_running_loop().create_future()
        self._waiters[request] = done
        self._scheduler.add(request)
        self._work.set()
        try:
            await done
        finally:
            self._waiters.pop(request, None)
            self._scheduler.abort(request)

    def _answer(self, request: Request, tokens: list[int], finish: str) -> dict[str, Any]:
        logprobs = [{"token_id": t, "logprob": -self._random.expovariate(1.0), "rank": 1} for t in tokens]
        self._scheduler.counts[f"success_{finish}"] += 1
        choice = {
            "index": 0,
            "finish_reason": finish,
            "token_ids": tokens,
            "logprobs": {"content": logprobs},
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in request.spans],
        }
        usage = {"prompt_tokens": len(request.prompt), "completion_tokens": len(tokens)}
        return {"request_id": f"generate-tokens-{uuid.uuid4().hex}", "choices": [choice], "usage": usage}

    def _kv_transfer(self, request: Request) -> dict[str, Any]:
        """Return where a decode engine fetches the KV blocks of a prefilled request."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(request.blocks)),
            "remote_engine_id": self._id,
            "remote_host": os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", ""),
            "remote_port": int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")),
            "tp_size": 1,
        }

    async def _update_weights(self, body: Body) -> tuple[int, object]:
        # Imported late: engines that never reach an update save the memory.
        from primeslurm.wire.weight_transfer.filesystem import MANIFEST, read_manifest

        info = body.update_info
        if info.session is not msgspec.UNSET:  # an emulated trainer has no tensors to send
            await asyncio.sleep(UPDATE_S)
            return 200, {}
        directory = Path(info.path)
        manifest = read_manifest(directory)
        if manifest is None or manifest.version != info.version:
            return 500, {"error": f"{directory}: no {MANIFEST} of version {info.version}"}
        for file in manifest.files:
            status = files.status(directory / file.name)
            if status is None or status.st_size != file.bytes:
                return 500, {"error": f"{directory / file.name}: size differs from the manifest"}
        await asyncio.sleep(UPDATE_S)
        return 200, {}


class Hangable(SecretGate):
    """Middleware that, after a request to `HANG_PATH`, keeps all connections open and answers none."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._hanging = False

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == HANG_PATH:
            self._hanging = True
            await http_server.answer(send, 200, {})
        elif self._hanging:
            await asyncio.Event().wait()
        else:
            await super().serve(scope, receive, send)


async def serve(host: str, port: int, engine: EmulatedEngine, *, gated: bool) -> None:
    """Serve until cancelled, with the version gate (`gated`), or as a teacher without it."""
    server = await http_server.start(Hangable(VersionGate(engine) if gated else engine), host, port)
    async with server:
        await engine.run()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="primeslurm.testbed.emulated.engine", allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="model")
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--num-gpu-blocks-override", type=int, default=KV_BLOCKS)
    parser.add_argument("--max-num-batched-tokens", type=int, default=BATCHED_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--middleware", default="", help="engines that are trained for have the version gate")
    options, _ = parser.parse_known_args(argv)
    # All engines of a deployment have the same --seed, but must sample different tokens.
    seed = hash((options.seed, options.host, options.port))
    sizes = (options.max_model_len, options.num_gpu_blocks_override, seed, options.max_num_batched_tokens)
    engine = EmulatedEngine(options.served_model_name, *sizes)
    asyncio.run(serve(options.host, options.port, engine, gated=options.middleware.endswith("VersionGate")))


if __name__ == "__main__":
    main()

"""An HTTP server with an engine's routes, and a sampler that knows the answers of the `Reverse: ` task.

Tests use it for what real vLLM servers cannot show within seconds: kills, restarts, long runs. It samples
deterministically: token i of a completion has log-probability -(i + 1) / 8. As a teacher it gives the token at position
i of a prompt -i / 16.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>", "<system>"]


def write_tokenizer(directory: Path, answers_end: str = "") -> Path:
    """Write a character tokenizer whose template ends earlier answers with `answers_end`. Return its directory."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *LETTERS, *":. ?!"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", additional_special_tokens=SPECIAL[2:]
    )
    fast.chat_template = TEMPLATE.replace("<eos>", f"{{% if m.role == 'assistant' %}}{answers_end}{{% endif %}}<eos>")
    fast.save_pretrained(directory)
    return directory


class FakeEngine:
    """Serves on a free port, in its own thread, until `stop`.

    Args:
        mistakes: number of wrong leading letters in every other answer.
        broken: number of first generate requests that get a 500.
        routed: answers route the token at position p to expert p % 200, in 3 layers with 2 experts each.
        answer: maps the word after a prompt's colon, or else its last message, to the answer.
    """

    def __init__(
        self,
        tokenizer: Path,
        mistakes: int = 1,
        delay_s: float = 0.01,
        broken: int = 0,
        routed: bool = False,
        answer: Callable[[str], str] = lambda word: word[::-1],
    ) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
        self._mistakes = mistakes
        self._delay_s = delay_s
        self.broken = broken
        self._routed = routed
        self._answer = answer
        self.version: int | None = None
        self.paused = False
        self.held = False
        """Whether answers are held back."""
        self.updates = 0
        self.requests: list[dict[str, Any]] = []
        self.busy = self.busiest = 0
        """Current and largest number of concurrent teacher requests."""
        self.sessions: list[str] = []
        self.headers: list[Any] = []
        """Headers of each generate request."""
        self.sampled: list[int] = []
        """Number of tokens of each completion."""
        self._incarnation = uuid.uuid4().hex
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self.url = ""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/primeslurm/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/{control}", self._control)
        runner = web.AppRunner(app, handler_cancellation=True)  # as in vLLM, a disconnect cancels the request
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.version is None:
            return web.json_response({"error": "stale"}, status=503)
        if self.broken > 0:
            self.broken -= 1
            return web.json_response({"error": "broken"}, status=500)
        first = self.version
        self.requests.append(body)
        self.headers.append(request.headers)
        self.sessions.append(request.headers.get("X-Session-ID", ""))
        number = len(self.requests)
        await asyncio.sleep(self._delay_s)
        while self.paused or self.held:
            await asyncio.sleep(0.01)
        tokens = self._sample(body["token_ids"], number)[: body["sampling_params"]["max_tokens"]]
        self.sampled.append(len(tokens))
        half = len(tokens) // 2
        spans = (
            [(first, 0, half), (self.version, half, len(tokens))]
            if self.version != first
            else [(first, 0, len(tokens))]
        )
        finish = "stop" if tokens[-1] == self._tokenizer.eos_token_id else "length"
        choice = {
            "index": 0,
            "finish_reason": finish,
            "token_ids": tokens,
            "logprobs": {
                "content": [{"token_id": t, "logprob": -(i + 1) / 8, "rank": 1} for i, t in enumerate(tokens)]
            },
            "weight_versions": [{"version": str(v), "start": a, "end": b} for v, a, b in spans],
        }
        if self._routed:
            first_row = body["sampling_params"].get("routed_experts_prompt_start", 0)
            choice["routed_experts"] = routed(first_row, len(body["token_ids"]) + len(tokens) - 1)
        return web.json_response({"request_id": "generate-tokens-1", "choices": [choice]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.broken > 0:
            self.broken -= 1
            return web.json_response({"error": "broken"}, status=500)
        self.requests.append(body)
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        await asyncio.sleep(self._delay_s)
        self.busy -= 1
        if max(body["prompt"]) >= len(self._tokenizer):
            return web.json_response({"error": "a token is out of vocabulary"}, status=400)
        given = [{str(token): {"logprob": -i / 16, "rank": 1}} for i, token in enumerate(body["prompt"])]
        return web.json_response({"choices": [{"index": 0, "prompt_logprobs": [None, *given[1:]]}]})

    def _sample(self, prompt: list[int], number: int) -> list[int]:
        text = self._tokenizer.decode(prompt, skip_special_tokens=False).replace(" ", "")
        answer = self._answer(text.rsplit(":" if ":" in text else "<user>", 1)[1].split("<")[0])
        if number % 2:
            answer = "z" * self._mistakes + answer[self._mistakes :]
        return [*self._tokenizer.convert_tokens_to_ids(list(answer)), self._tokenizer.eos_token_id]

    async def _status(self, request: web.Request) -> web.Response:
        status = {"version": self.version, "incarnation": self._incarnation, "paused": self.paused}
        return web.json_response({**status, "updates": self.updates, "initialized": True})

    async def _control(self, request: web.Request) -> web.Response:
        body = json.loads(await request.text() or "{}")
        match request.path:
            case "/pause":
                self.paused = True
            case "/resume":
                self.paused = False
            case "/start_weight_update":
                self.updates += 1
            case "/finish_weight_update":
                self.version = int(body["weight_version"])
            case "/update_weight_version":
                self.version = int(body["new_version"])
        return web.json_response({})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text='vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
        )


def routed(start: int, end: int) -> str:
    """Return routed experts in vLLM's format: position p goes to expert p % 200, in 3 layers with 2 experts each."""
    rows = np.arange(start, end) % 200
    file = io.BytesIO()
    np.save(file, np.broadcast_to(rows[:, None, None], (len(rows), 3, 2)).astype(np.uint8))
    return base64.b64encode(file.getvalue()).decode()

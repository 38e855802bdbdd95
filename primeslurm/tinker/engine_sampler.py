"""Samples from engines that serve adapters by name (`inference.weight_receivers.named_adapters`).

Samples run beside each other and beside training. Engines keep no state of them, so that a request whose engine is lost
is sent again, to any engine.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from primeslurm.base import files
from primeslurm.base.model_files import locate
from primeslurm.orchestrator.worker.generate_endpoint import Completion, completion_of
from primeslurm.tinker.requests import ModelLimits, RequestError, SamplingParams
from primeslurm.tinker.sampler import Samples, end_tokens
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.names import ADAPTERS, GENERATE
from primeslurm.wire.transport import secret
from primeslurm.wire.transport.http import BUSY, UnavailableError, error_text, internal_client
from primeslurm.wire.transport.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S

# A sample fails if no engine answers for this long after its first failure [s].
AWAY_S = 300.0
# Longest time of one request to an engine [s].
ANSWER_S = 7200.0
# While a request waits, its engine is asked this often whether it is healthy [s].
PROBE_S = 30.0
# Failed probes in a row after which an engine is given up.
PROBES = 3
# Requests to engines at the same time. Each has a connection, and processes may have 1024 files open.
IN_FLIGHT = 512
T = TypeVar("T")


class NoEngineError(Exception):
    """No engine can sample. The client's request is valid."""


class _Model(msgspec.Struct):
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Logprob(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


@dataclass
class _Engine:
    """An engine, or a router to several."""

    url: str
    in_flight: int = 0
    length: int = 0
    """Longest sequence [tokens]. 0: not known yet."""
    failed_at: float = float("-inf")


class EngineSampler:
    """Samples of the model and of adapters, with log-probabilities at temperature 1.

    It has a thread with an event loop of its own, to which `start` adds work.
    """

    def __init__(self, urls: Sequence[str], limits: ModelLimits, away_s: float = AWAY_S) -> None:
        self._engines = [_Engine(url.rstrip("/")) for url in urls]
        self._limits, self._away_s = limits, away_s
        self._ends = sorted(end_tokens(limits.model))
        self._client = internal_client(ANSWER_S, keep=0)  # engines close idle connections early
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinker-engines", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine. If the future is cancelled, so is the work, and engines stop sampling for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

        self.start(end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def sample(
        self, adapter: str | None, prompt: Sequence[int], params: SamplingParams, count: int, scored: int
    ) -> Samples:
        """Sample `count` sequences with an adapter, by its name, or with the model. See `TrainerSampler.sample`.

        Raises RequestError if an engine refuses the request, and NoEngineError if no engine can answer it.
        """
        # Engines return log-probabilities of the distribution from which they draw. If it is not the model's at
        # temperature 1, a second request scores the sample.
        as_drawn = params.temperature == 0 or (params.temperature == 1 and params.top_k <= 0 and params.top_p == 1)

        async def one(index: int) -> tuple[Completion, list[float]]:
            scores_prompt = bool(scored) and index == 0
            sampling = self._sampling(params, index) | {"prompt_logprobs": 0 if scores_prompt else None}
            completion, content = await self._ask(adapter, prompt, sampling, params.max_tokens, reserved=not as_drawn)
            if not as_drawn:
                whole = [*prompt, *completion.token_ids]
                _, again = await self._ask(adapter, whole, {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0}, 1)
                completion = replace(completion, logprobs=_prompt_logprobs(again, len(whole))[len(prompt) :])
            return completion, _prompt_logprobs(content, len(prompt)) if scores_prompt else []

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(index)) for index in range(count)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        answers = [task.result() for task in tasks]
        hidden = max(1, len(prompt) - scored)
        scores = [float("nan")] * hidden + answers[0][1][hidden:] if scored else None
        return [(c.finish_reason or "length", c.token_ids, c.logprobs) for c, _ in answers], scores

    def _sampling(self, params: SamplingParams, index: int) -> dict[str, object]:
        """Return an engine's parameters of the sample `index` of a request."""
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        words = [word for word in stop or () if isinstance(word, str)]
        tokens = [token for token in stop or () if isinstance(token, int)]
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(0, params.top_k),
            "seed": None if params.seed is None else (params.seed + index) % 2**63,
            "stop": words,
            "detokenize": bool(words),
            "skip_special_tokens": False,  # special tokens may be part of stop strings
            "stop_token_ids": [] if stop == [] else [*self._ends, *tokens],
            "ignore_eos": True,  # the end tokens are above
            "logprobs": 0,
        }

    async def _ask(
        self,
        adapter: str | None,
        prompt: Sequence[int],
        sampling: dict[str, object],
        max_tokens: int | None,
        reserved: bool = False,
    ) -> tuple[Completion, bytes]:
        """Return an engine's answer, decoded and as it came. Keep trying while no engine answers.

        `reserved`: leave room for one more token.
        """
        first_failure, pause_s = None, FIRST_PAUSE_S
        while True:
            engine = min(
                self._engines, key=lambda each: (time.monotonic() - each.failed_at < LONGEST_PAUSE_S, each.in_flight)
            )
            engine.in_flight += 1
            try:
                async with self._room:
                    room = await self._length(engine) - len(prompt) - reserved
                    if room < (max_tokens or 1):
                        value = f"{len(prompt)} tokens and {max_tokens or 1} to sample"
                        longest = engine.length - reserved
                        raise RequestError("prompt", value, f"the engines' longest sequence has {longest} here")
                    body: dict[str, object] = {"model": adapter, "token_ids": prompt, "stream": False}
                    body["sampling_params"] = sampling | {"max_tokens": max_tokens or room}
                    content = await self._post(engine, msgspec.json.encode(body))
                return completion_of(content, len(prompt), None), content
            except (httpx.TransportError, UnavailableError, DamagedError) as error:
                now = engine.failed_at = time.monotonic()
                engine.length = 0  # another engine may start at this address
                first_failure = first_failure or now
                within_s = min(self._away_s, files.CACHE_S) if isinstance(error, _UnknownAdapterError) else self._away_s
                if now - first_failure >= within_s:
                    text = f"no engine has answered for {within_s:.0f} s: {engine.url}: {type(error).__name__} {error}"
                    raise NoEngineError(text) from error
            finally:
                engine.in_flight -= 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _length(self, engine: _Engine) -> int:
        """Return the longest sequence of an engine. Raises NoEngineError if it has another model."""
        if not engine.length:
            answer = await self._client.get(f"{engine.url}/v1/models", timeout=PROBE_S)
            models = decode_json(self._checked(engine, answer), _Models).data
            base = next((each for each in models if not each.parent), _Model())
            if base.root and not self._is_trained(base.root):
                why = f"serves {base.root}, but this service trains {self._limits.model}; start it with --model of that"
                raise NoEngineError(f"{engine.url} {why}")
            engine.length = base.max_model_len or self._limits.length
        return engine.length

    def _is_trained(self, model: str) -> bool:
        try:
            return locate(model) == Path(self._limits.model).resolve()
        except OSError:  # it is not on this host
            return False

    async def _post(self, engine: _Engine, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        answer = asyncio.create_task(self._client.post(engine.url + GENERATE, content=body, headers=headers))
        failed = 0
        try:
            while not (await asyncio.wait({answer}, timeout=PROBE_S))[0]:
                # The host of an engine may be lost, or its core hang, without a sign on this connection.
                failed = 0 if await self._is_healthy(engine) else failed + 1
                if failed == PROBES:
                    raise UnavailableError(f"it has not been healthy for {PROBES} probes")
            return self._checked(engine, answer.result())
        finally:
            answer.cancel()

    async def _is_healthy(self, engine: _Engine) -> bool:
        try:
            return (await self._client.get(f"{engine.url}/health", timeout=PROBE_S)).is_success
        except httpx.TransportError:
            return False

    def _checked(self, engine: _Engine, answer: httpx.Response) -> bytes:
        """Return the content of an answer, or raise its error."""
        if answer.is_success:
            return answer.content
        text = f"{answer.status_code}: {error_text(answer.content)}"
        if answer.status_code == httpx.codes.NOT_FOUND:  # its host may see the adapter's files late
            raise _UnknownAdapterError(f"{text}. Start engines with {ADAPTERS} as this service prints it")
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise NoEngineError(f"{engine.url}: {text}. Start the service with the engines' {secret.VARIABLE}")
        if answer.is_client_error and answer.status_code not in BUSY:
            raise RequestError("engine", "", f"refused the request: {text}")
        raise UnavailableError(text)


class _UnknownAdapterError(UnavailableError):
    """An engine does not know an adapter."""


def _prompt_logprobs(content: bytes, length: int) -> list[float]:
    """Return the log-probability of each token of a prompt. The first one has none."""
    scores = decode_json(content, _Scored).prompt_logprobs or []
    values = [next(iter(each.values())).logprob if each else float("nan") for each in scores]
    if len(values) != length:
        raise NoEngineError(f"an engine returned {len(values)} log-probabilities for a prompt of {length} tokens")
    return values

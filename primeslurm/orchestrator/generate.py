"""Token-in, token-out: the client through which verifiers' environments reach the engines.

`verifiers.v1.clients.TrainClient` renders messages to token ids (extending the sampled tokens of earlier turns as they
are), posts them to `/inference/v1/generate`, and records sampled tokens and log-probabilities in the trace. It neither
keeps policy versions nor tries again, and reads another shape of log-probabilities than vLLM 0.32 sends. All three are
mended behind the one thing it asks of its HTTP client: `post`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import verifiers.v1 as vf
from openai import APIConnectionError, APIStatusError
from verifiers.v1.clients import TrainClient, TrainClientConfig
from verifiers.v1.interception import InterceptionServer

FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 5.0
MOVE_POLL_S = 2.0
LOADED_VERSION = "default"
"""What vLLM calls the weights it loaded at start, until it is told a version: version 0."""


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_VersionSpan]
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Moved(Exception):
    """The router listens elsewhere now."""


@dataclass(frozen=True)
class Completion:
    """What one request sampled; all lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """Policy version that sampled each token."""


@dataclass(frozen=True)
class Reply:
    """The body of an answer in the shape that `renderers` reads."""

    content: bytes


class GenerateEndpoint:
    """Posts to one router's `/inference/v1/generate` until it succeeds or the deadline has come.

    An engine without the current policy answers 503, and a router answers 5xx while an engine is being restarted.

    Args:
        base_url: stands for the router in the URLs that are posted to.
        where: the router's URL as it is now; a request that waits for an answer follows it when it changes.
        max_len: longest sequence an engine accepts; completions end there.
        timeout_s: longest wait for one answer, retries included.
    """

    def __init__(self, base_url: str, where: Callable[[], str], max_len: int, timeout_s: float) -> None:
        self.base_url = base_url
        self._where = where
        self._max_len = max_len
        self._timeout_s = timeout_s
        self._completions: dict[str, list[Completion]] = {}
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def get(self, path: str, cast_to: Any) -> dict[str, Any]:
        """`renderers` asks for the longest prompt of each model; `max_len` is checked here instead."""
        return {"data": []}

    async def post(self, url: str, cast_to: Any, body: dict[str, Any], options: Mapping[str, Any]) -> Reply:
        """Generate.

        Raises:
            APIStatusError: the request is wrong (4xx).
            APIConnectionError: no answer before the deadline.
            msgspec.ValidationError: the answer lacks log-probabilities or policy versions.
        """
        headers = dict(options["headers"])
        answer = await self._insist(url.removeprefix(self.base_url), self._request(body), headers)
        choice = msgspec.json.decode(answer.content, type=_Answer).choices[0]
        completion = Completion(choice.token_ids, [c.logprob for c in choice.logprobs.content], _versions(choice))
        self._completions.setdefault(headers["X-Session-ID"], []).append(completion)
        return _reply(choice)

    def take(self, session: str) -> list[Completion]:
        """All completions of a session (a verifiers trace id) so far; they are then forgotten."""
        return self._completions.pop(session, [])

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = dict(body["sampling_params"])
        room = self._max_len - len(body["token_ids"])
        if room < 1:
            request = httpx.Request("POST", self.base_url)
            raise APIStatusError(
                f"a prompt of {len(body['token_ids'])} tokens leaves no room in {self._max_len}",
                response=httpx.Response(400, request=request),
                body=None,
            )
        sampling["max_tokens"] = min(sampling.get("max_tokens") or room, room)
        sampling["logprobs"] = 0  # the sampled token's own, no alternatives
        return {**body, "model": None, "sampling_params": sampling, "stream": False}

    async def _insist(self, path: str, request: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        deadline = time.monotonic() + self._timeout_s
        pause = FIRST_RETRY_S
        while True:
            try:
                answer = await self._try(path, request, headers)
            except (httpx.HTTPError, _Moved) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return answer
                problem = f"{answer.status_code}: {answer.text[:500]}"
                if answer.is_client_error:
                    raise APIStatusError(problem, response=answer, body=None)
            if time.monotonic() + pause > deadline:
                request_ = httpx.Request("POST", self._where() + path)
                raise APIConnectionError(message=f"{request_.url}: {problem}", request=request_)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, LONGEST_RETRY_S)

    async def _try(self, path: str, request: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        """One try. A node that is gone never answers: when its router has moved, waiting for it is over."""
        where = self._where()
        answer = asyncio.create_task(self._http.post(where + path, json=request, headers=headers))
        try:
            while not (await asyncio.wait({answer}, timeout=MOVE_POLL_S))[0]:
                if self._where() != where:
                    raise _Moved(f"{where} has moved to {self._where()}")
            return answer.result()
        finally:
            answer.cancel()


class TokenClient(TrainClient):  # type: ignore[misc]
    """A TrainClient that talks through a GenerateEndpoint.

    Args:
        router: process name of the router.
        where: its URL as it is now.
        model: the directory of the tokenizer.
        max_len: longest sequence an engine accepts.
        timeout_s: longest wait for one answer, retries included.
    """

    def __init__(self, router: str, where: Callable[[], str], model: str, max_len: int, timeout_s: float) -> None:
        config = TrainClientConfig(base_url=f"http://{router}", api_key_var="UNUSED", renderer_model_name=model)
        super().__init__(config)
        self.key = config.model_dump_json()
        self.endpoint = GenerateEndpoint(config.base_url, where, max_len, timeout_s)
        self.client = self.endpoint


@asynccontextmanager
async def serving(env: vf.Env) -> AsyncIterator[dict[str, Any]]:
    """`env.serving()`; yields the clients by config, to put ours among them.

    verifiers builds clients from configs and offers no place to register another class. Its interception server keeps
    one client per config, so ours is put there before the first rollout that names its config. Raises TypeError if
    `env` is not configured with a single interception server.
    """
    async with env.serving():
        server = env._interception
        if not isinstance(server, InterceptionServer):
            raise TypeError(f"the environment must use interception type 'server', not {type(server).__name__}")
        yield server.clients


def _versions(choice: _Choice) -> list[int]:
    versions: list[int] = []
    for span in choice.weight_versions:
        versions += [0 if span.version == LOADED_VERSION else int(span.version)] * (span.end - span.start)
    if len(versions) != len(choice.token_ids):
        raise msgspec.ValidationError(f"{len(versions)} policy versions for {len(choice.token_ids)} tokens")
    return versions


def _reply(choice: _Choice) -> Reply:
    """`renderers` 0.1 reads the log-probabilities that vLLM sends in text mode: tokens as `token_id:N`."""
    content = [
        {"token": f"token_id:{token}", "logprob": entry.logprob}
        for token, entry in zip(choice.token_ids, choice.logprobs.content, strict=True)
    ]
    fields = {"index": 0, "finish_reason": choice.finish_reason, "token_ids": choice.token_ids}
    return Reply(msgspec.json.encode({"choices": [{**fields, "logprobs": {"content": content}}]}))

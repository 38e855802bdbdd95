"""Generation over HTTP: token ids to `/inference/v1/generate`, sampled tokens and their policy versions back."""

from __future__ import annotations

import asyncio
import binascii
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
import numpy as np

from primeslurm.wire import routed_experts
from primeslurm.wire.http import client_within_run
from primeslurm.wire.retry import insisting
from primeslurm.wire.routed_experts import RoutedExperts

GENERATE = "/inference/v1/generate"
MOVE_POLL_S = 2.0
LOADED_VERSION = "default"
"""What vLLM calls the weights it loaded at start, until it is told a version: version 0."""
ROUTED_FROM = "routed_experts_prompt_start"
"""Sampling parameter: routed experts are wanted from this position on (vLLM's name for it)."""


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
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[dict[str, int]]] | None = None


class MovedError(Exception):
    """Whoever was asked listens elsewhere now, or nowhere."""


class UnavailableError(Exception):
    """Whoever was asked cannot answer now, and may later."""


class RefusedError(Exception):
    """The request is wrong: trying again would not help.

    Args:
        text: what is wrong.
        status: the HTTP status, 4xx.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


NO_ANSWER = "no engine answered"
"""How a NoAnswerError begins: errors travel as text, and this one is no environment's fault."""


class NoAnswerError(Exception):
    """No engine answered before the deadline."""


@dataclass(frozen=True)
class Completion:
    """What one request sampled; all lists have one entry per sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """Policy version that sampled each token."""
    finish_reason: str | None = None
    routed_experts: RoutedExperts | None = None
    """Of prompt and sampled tokens together, from position `routed_from` on."""
    routed_from: int = 0
    prompt_ids: list[int] | None = None
    """The prompt with as many placeholders as its images have tokens; None without images."""
    placeholders: dict[str, list[dict[str, int]]] | None = None
    """`offset` and `length` in it of each image."""


class GenerateEndpoint:
    """Posts to one router until it succeeds or the deadline has come.

    An engine without the current policy answers 503, and a router answers 5xx while an engine is being restarted.

    Args:
        where: the router's URL as it is now; a request that waits for an answer follows it when it changes.
        max_len: longest sequence an engine accepts; completions end there.
        timeout_s: longest wait for one answer, retries included.
        routed: answers must say which experts each token was routed to.
    """

    def __init__(self, where: Callable[[], str], max_len: int, timeout_s: float, routed: bool = False) -> None:
        self._where = where
        self._max_len = max_len
        self._timeout_s = timeout_s
        self._routed = routed
        self._http = client_within_run(timeout_s)

    async def generate(self, body: dict[str, Any], headers: dict[str, str], path: str = GENERATE) -> Completion:
        """Sample one completion of `body["token_ids"]`.

        Raises:
            RefusedError: the request is wrong (4xx).
            NoAnswerError: no answer before the deadline.
            msgspec.ValidationError: the answer lacks log-probabilities, policy versions or routed experts.
        """
        posted = await self._insist(path, self._request(body), headers)
        answer = msgspec.json.decode(posted.content, type=_Answer)
        choice = answer.choices[0]
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        completion = Completion(
            choice.token_ids,
            logprobs,
            _versions(choice),
            choice.finish_reason,
            prompt_ids=answer.prompt_token_ids,
            placeholders=answer.mm_placeholders,
        )
        if not self._routed:
            return completion
        first = body["sampling_params"].get(ROUTED_FROM, 0)
        tokens = len(completion.prompt_ids or body["token_ids"]) + len(choice.token_ids) - first
        return replace(completion, routed_experts=_routed_experts(choice, tokens), routed_from=first)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = dict(body["sampling_params"])
        room = self._max_len - len(body["token_ids"])
        if room < 1:
            raise RefusedError(f"a prompt of {len(body['token_ids'])} tokens leaves no room in {self._max_len}", 400)
        if "content_parts" not in body:  # how many tokens images take, only the engine knows
            sampling["max_tokens"] = min(sampling.get("max_tokens") or room, room)
        sampling["logprobs"] = 0  # the sampled token's own, no alternatives
        return {**body, "model": None, "sampling_params": sampling, "stream": False}

    async def _insist(self, path: str, request: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        try:
            return await insisting(_NOT_NOW, self._timeout_s)(self._try, path, request, headers)
        except _NOT_NOW as error:
            words = str(error) if isinstance(error, UnavailableError) else f"{type(error).__name__}: {error}"
            raise NoAnswerError(f"{NO_ANSWER}: {self._where()}{path}: {words}") from error

    async def _try(self, path: str, request: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        where = self._where()
        answer = await post_while(self._http, where + path, lambda: self._where() == where, request, headers)
        if answer.is_success:
            return answer
        problem = f"{answer.status_code}: {answer.text[:500]}"
        if answer.is_client_error:
            raise RefusedError(problem, answer.status_code)
        raise UnavailableError(problem)


_JSON = {"Content-Type": "application/json"}
_NOT_NOW = (httpx.HTTPError, MovedError, UnavailableError)


async def post_while(
    http: httpx.AsyncClient,
    url: str,
    stays: Callable[[], bool],
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """Post JSON. A node that is gone never answers: waiting is over once `stays` says so.

    Raises:
        MovedError: nobody is to be expected at `url` any more.
        httpx.HTTPError: no answer.
    """
    content = msgspec.json.encode(body)  # ten times as fast as httpx's own on a long prompt
    answer = asyncio.create_task(http.post(url, content=content, headers={**_JSON, **(headers or {})}))
    try:
        while not (await asyncio.wait({answer}, timeout=MOVE_POLL_S))[0]:
            if not stays():
                raise MovedError(f"{url} has moved")
        return answer.result()
    finally:
        answer.cancel()


def _versions(choice: _Choice) -> list[int]:
    versions: list[int] = []
    for span in choice.weight_versions:
        versions += [0 if span.version == LOADED_VERSION else int(span.version)] * (span.end - span.start)
    if len(versions) != len(choice.token_ids):
        raise msgspec.ValidationError(f"{len(versions)} policy versions for {len(choice.token_ids)} tokens")
    return versions


def _routed_experts(choice: _Choice, tokens: int) -> RoutedExperts:
    """Read the .npy file [tokens - 1, layers, top_k] that vLLM sends: nothing was computed from the last token."""
    if choice.routed_experts is None:
        raise msgspec.ValidationError("no routed experts: the engine runs without --enable-return-routed-experts")
    file = io.BytesIO(binascii.a2b_base64(choice.routed_experts))
    found: RoutedExperts = np.lib.format.read_array(file, allow_pickle=False)  # type: ignore[no-untyped-call]
    if len(found) != tokens - 1:
        raise msgspec.ValidationError(f"routed experts of {len(found)} tokens instead of {tokens - 1}")
    return routed_experts.join([found, None], [tokens - 1, 1], found)

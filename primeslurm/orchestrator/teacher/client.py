"""The teacher over HTTP: token ids to `/v1/completions`, the log-probability of each of them back."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence

import httpx
import msgspec
import numpy as np

from primeslurm.base.errors import PrimeslurmError
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.teacher import PolicyTeacher, ServedTeacher
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.frames import Float32
from primeslurm.wire.batches.rollout import LARGEST_LOGPROB
from primeslurm.wire.decoding import decode_json
from primeslurm.wire.transport.http import (
    BUSY,
    MovedError,
    UnavailableError,
    external_client,
    internal_client,
    post_while,
    words,
)
from primeslurm.wire.transport.retry import retry_with_backoff

log = logging.getLogger(__name__)

AVOID_S = 5.0
"""An engine that failed a request gets no other for this long, as long as there are others."""
MOST_DAMAGED = 3
"""Answers without the log-probabilities of one prompt, after which the teacher is no teacher."""


class TeacherError(PrimeslurmError):
    """The teacher refuses, or does not answer what it was asked. It would do so every time: the attempt ends."""

    exit_code = exit_codes.STALLED


class _Logprob(msgspec.Struct):
    logprob: float


_Entry = dict[str, _Logprob] | None
"""By token; null for the first one."""


class _Choice(msgspec.Struct):
    prompt_logprobs: list[msgspec.Raw]
    """An `_Entry` for each token."""


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class Teacher:
    """A model, on one engine or several.

    Args:
        where: base URLs (`.../v1`) of its engines, those that are known now. Requests go to the one with the fewest.
        http: with the headers that admit to it.
        model: the name it is served by; None: whatever is served.
    """

    def __init__(
        self,
        where: Callable[[], Sequence[str]],
        http: httpx.AsyncClient,
        model: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where = where
        self._http = http
        self._model = model
        self._clock = clock
        self._inflight: Counter[str] = Counter()
        self._avoided: dict[str, float] = {}

    async def logprobs(self, token_ids: Sequence[int]) -> Float32:
        """Ask for the log-probability of each token, given those before it. Waits as long as it takes.

        Returns:
            [n_tokens]; 0 for the first.

        Raises:
            TeacherError: it refuses the request, or MOST_DAMAGED of its answers have no log-probabilities.
        """
        # No token is wanted, but one is the least that can be asked for; it is not even turned into text.
        body: dict[str, object] = {
            "prompt": list(token_ids),
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "detokenize": False,
        }
        if self._model is not None:
            body["model"] = self._model
        for damaged in range(1, MOST_DAMAGED + 1):
            engine, answer = await self._ask(body)
            try:
                return await asyncio.to_thread(_logprobs_in, answer.content, token_ids)
            except (LookupError, ValueError) as error:
                why = f"{answer.url}: no log-probabilities of the prompt: {error!r}"
                if damaged == MOST_DAMAGED:
                    raise TeacherError(why) from error
                log.warning("%s; the prompt is asked about again", why)
                self._avoided[engine] = self._clock() + AVOID_S
        raise AssertionError("unreachable")

    async def _ask(self, body: dict[str, object]) -> tuple[str, httpx.Response]:
        """Ask until an engine answers. Return the URL of the engine, and its answer."""
        asked: tuple[str, httpx.Response] = await retry_with_backoff(UnavailableError)(self._try, body)
        return asked

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _engine(self) -> str | None:
        """The engine with the fewest requests; one that failed lately only if all did, the one longest ago first."""
        now = self._clock()
        since = {url: max(now, self._avoided.get(url, now)) for url in self._where()}
        return min(since, key=lambda url: (since[url], self._inflight[url]), default=None)

    async def _try(self, body: dict[str, object]) -> tuple[str, httpx.Response]:
        """One try. Raises UnavailableError if it has to be tried again."""
        url = self._engine()
        if url is None:
            raise UnavailableError("no engine of the teacher is known")
        self._inflight[url] += 1
        try:
            answer = await post_while(self._http, f"{url}/completions", lambda: url in self._where(), body)
        except (httpx.HTTPError, MovedError):
            answer = None
        finally:
            self._inflight[url] -= 1
        if answer is not None and answer.is_success:
            self._avoided.pop(url, None)
            return url, answer
        if answer is not None and answer.is_client_error and answer.status_code not in BUSY:
            raise TeacherError(f"{url}: the teacher refuses: {answer.status_code} {words(answer)}")
        self._avoided[url] = self._clock() + AVOID_S
        raise UnavailableError(f"{url}: no answer")


def _logprobs_in(content: bytes, token_ids: Sequence[int]) -> Float32:
    """Read an answer about a prompt of these tokens: 0.1 s for 131,072, so not on the event loop.

    Entries are decoded one by one: what decodes all at once lets nobody else compute meanwhile.

    Raises:
        LookupError: a token's log-probability is missing.
        ValueError: it is no answer, or about another number of tokens, or has what is no log-probability.
    """
    found = decode_json(content, _Answer).choices[0].prompt_logprobs
    given = zip(token_ids[1:], found[1:], strict=True)
    values = [0.0, *(_logprob_in(entry, token) for token, entry in given)]
    if not all(abs(value) <= LARGEST_LOGPROB for value in values):
        raise ValueError(f"a log-probability of {max(values, key=abs)}")
    return np.array(values, np.float32)


def _logprob_in(entry: msgspec.Raw, token: int) -> float:
    found: _Entry = decode_json(entry, _Entry)  # type: ignore[arg-type]  # a union is no type
    return (found or {})[str(token)].logprob


def teacher_of(recipe: Recipe, arguments: OrchestratorArguments) -> Teacher:
    """Make the recipe's teacher, which it must have.

    Raises:
        TeacherError: the variable of its key is not set.
    """
    teacher = recipe.teacher
    assert teacher is not None
    timeout_s = recipe.orchestrator.request_timeout_s
    if isinstance(teacher, PolicyTeacher):
        return Teacher(lambda: [f"{url}/v1" for url in _own_engines(arguments)], internal_client(timeout_s))
    if not isinstance(teacher, ServedTeacher):
        return Teacher(lambda: [f"{url}/v1" for url in arguments.teacher_urls()], internal_client(timeout_s))
    headers = {"Authorization": f"Bearer {_key(teacher.key_env)}"} if teacher.key_env else {}
    return Teacher(lambda: [teacher.base_url.rstrip("/")], external_client(timeout_s, headers), teacher.model)


def _own_engines(arguments: OrchestratorArguments) -> list[str]:
    """URLs of the run's engines; of those for prefill where they are apart, as prompts are all that is computed."""
    found = arguments.engine_urls()
    prefill = [url for name, url in found.items() if name.startswith("prefill")]
    return prefill or list(found.values())


def _key(variable: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise TeacherError(f"{variable}, the key of the teacher, is not set")
    return key

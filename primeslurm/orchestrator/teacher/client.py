"""The teacher over HTTP: token ids to `/v1/completions`, the log-probability of each token back."""

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

AVOID_S = 5.0  # an engine that failed a request gets no other one for this long, if there are other engines
MAX_DAMAGED = 3  # damaged answers to one prompt after which the attempt ends


class TeacherError(PrimeslurmError):
    """The teacher refuses a request, or gives damaged answers. A retry would not help, so the attempt ends."""

    exit_code = exit_codes.STALLED


class _Logprob(msgspec.Struct):
    logprob: float


_Entry = dict[str, _Logprob] | None  # log-probabilities of a position by token; None for the first position


class _Choice(msgspec.Struct):
    prompt_logprobs: list[msgspec.Raw]  # an `_Entry` for each token


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class Teacher:
    """A model on one or several engines.

    Args:
        where: Returns the current base URLs (`.../v1`) of its engines. The engine with the fewest requests is used.
        model: Name of the served model; None: the only one.
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
        """Return the log-probability of each token given the tokens before it: [tokens], 0 for the first.

        It retries without limit while engines do not answer. Raise TeacherError if the teacher refuses the request, or
        MAX_DAMAGED answers have no log-probabilities.
        """
        # One token is the least that can be requested. It is not even turned into text.
        body: dict[str, object] = {
            "prompt": list(token_ids),
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "detokenize": False,
        }
        if self._model is not None:
            body["model"] = self._model
        for damaged in range(1, MAX_DAMAGED + 1):
            answer: tuple[str, httpx.Response] = await retry_with_backoff(UnavailableError)(self._try, body)
            engine, response = answer
            try:
                return await asyncio.to_thread(_logprobs_in, response.content, token_ids)
            except (LookupError, ValueError) as error:
                why = f"{response.url}: no log-probabilities of the prompt: {error!r}"
                if damaged == MAX_DAMAGED:
                    raise TeacherError(why) from error
                log.warning("%s; the request is repeated", why)
                self._avoided[engine] = self._clock() + AVOID_S
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._http.aclose()

    def _engine(self) -> str | None:
        """Return the engine with the fewest requests. If all have failed lately, return the one that failed first."""
        now = self._clock()
        since = {url: max(now, self._avoided.get(url, now)) for url in self._where()}
        return min(since, key=lambda url: (since[url], self._inflight[url]), default=None)

    async def _try(self, body: dict[str, object]) -> tuple[str, httpx.Response]:
        """Return the URL of an engine and its answer. Raise UnavailableError if the request must be repeated."""
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
    """Decode an answer about a prompt of these tokens.

    It takes 0.1 s for 131,072 tokens, so it runs in a thread. Entries are decoded one by one, because decoding all at
    once would hold the interpreter's lock. Raise LookupError if a token has no log-probability, and ValueError if the
    answer is invalid, or has another number of tokens.
    """
    entries = decode_json(content, _Answer).choices[0].prompt_logprobs
    values = [0.0, *(_logprob_in(entry, token) for token, entry in zip(token_ids[1:], entries[1:], strict=True))]
    if not all(abs(value) <= LARGEST_LOGPROB for value in values):
        raise ValueError(f"a log-probability of {max(values, key=abs)}")
    return np.array(values, np.float32)


def _logprob_in(raw: msgspec.Raw, token: int) -> float:
    entry: _Entry = decode_json(raw, _Entry)  # type: ignore[arg-type]  # a union is no type
    return (entry or {})[str(token)].logprob


def teacher_of(recipe: Recipe, arguments: OrchestratorArguments) -> Teacher:
    """Create the recipe's teacher, which must exist. Raise TeacherError if the variable of its key is not set."""
    teacher = recipe.teacher
    assert teacher is not None
    timeout_s = recipe.orchestrator.request_timeout_s
    if isinstance(teacher, PolicyTeacher):
        return Teacher(lambda: [f"{url}/v1" for url in _policy_engines(arguments)], internal_client(timeout_s))
    if not isinstance(teacher, ServedTeacher):
        return Teacher(lambda: [f"{url}/v1" for url in arguments.teacher_urls()], internal_client(timeout_s))
    headers = {"Authorization": f"Bearer {_key(teacher.key_env)}"} if teacher.key_env else {}
    return Teacher(lambda: [teacher.base_url.rstrip("/")], external_client(timeout_s, headers), teacher.model)


def _policy_engines(arguments: OrchestratorArguments) -> list[str]:
    """Return the URLs of the run's engines, only of prefill engines if there are any, because nothing is decoded."""
    urls = arguments.engine_urls()
    prefill = [url for name, url in urls.items() if name.startswith("prefill")]
    return prefill or list(urls.values())


def _key(variable: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise TeacherError(f"{variable}, the key of the teacher, is not set")
    return key

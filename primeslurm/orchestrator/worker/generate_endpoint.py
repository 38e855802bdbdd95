"""Generation over HTTP: token ids to `/inference/v1/generate`, sampled tokens and their policy versions back."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import httpx
import msgspec

from primeslurm.wire.batches import routed_experts
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.decoding import Count, DamagedError, decode_json
from primeslurm.wire.names import ENGINE_HEADER
from primeslurm.wire.transport.http import Clients, internal_client, words
from primeslurm.wire.transport.retry import retry_with_backoff

GENERATE = "/inference/v1/generate"
BUSY = (408, 425, 429)
"""4xx answers that blame no request: the server has no room or no time for it now."""
MOVE_POLL_S = 2.0
LOADED_VERSION = "default"
"""What vLLM calls the weights it loaded at start, until it is told a version: version 0."""
LARGEST_LOGPROB = 1e30
"""By magnitude. vLLM says -9999 where a probability is 0."""
HIGHEST_LOGPROB = 0.01
"""A log-probability is at most 0. Rounding may exceed that a little."""
NO_LOGPROB = -9999.0
"""What vLLM says where it has no log-probability, and where a probability is 0."""
MOST_TASKS = 8
"""Tasks that one report of damaged answers names. As many are enough to tell a bad engine from a bad prompt."""
ROUTED_FROM = "routed_experts_prompt_start"
"""Sampling parameter: routed experts are wanted from this position on (vLLM's name for it)."""


class _VersionSpan(msgspec.Struct):
    version: Annotated[str, msgspec.Meta(pattern=rf"^({LOADED_VERSION}|[0-9]{{1,9}})$")]
    start: Count
    end: Count


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    token_ids: list[Count]
    logprobs: _Logprobs
    weight_versions: list[_VersionSpan]
    finish_reason: Annotated[str, msgspec.Meta(max_length=100)] | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")
    """Not made a string of: it is 100 MB of base64 for 131,072 tokens of 75 layers and 8 experts. TAKEN if these were
    taken out before."""


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    prompt_token_ids: list[Count] | None = None
    mm_placeholders: dict[str, list[dict[str, Count]]] | None = None


class AnswerCounts(msgspec.Struct):
    """How many answers of one engine were usable since the last report."""

    good: Count = 0
    damaged: Count = 0
    tasks: list[str] = []
    """Some of the tasks whose requests got damaged answers."""
    error: str = ""
    """What was wrong with the last damaged answer."""


class AnswerTally:
    """Counts usable and damaged answers by engine, for a worker's reports."""

    def __init__(self) -> None:
        self._answers: dict[str, AnswerCounts] = {}
        self._tasks: dict[str, str] = {}

    def begin(self, session: str, task: str) -> None:
        """Note which task a session is of."""
        self._tasks[session] = task

    def end(self, session: str) -> None:
        """Forget a session."""
        self._tasks.pop(session, None)

    def good(self, engine: str) -> None:
        """Count a usable answer."""
        self._answers.setdefault(engine, AnswerCounts()).good += 1

    def damaged(self, engine: str, session: str, error: str) -> None:
        """Count a damaged answer."""
        answers = self._answers.setdefault(engine, AnswerCounts(tasks=[]))
        answers.damaged, answers.error = answers.damaged + 1, error[:LONGEST_REASON]
        task = self._tasks.get(session, session)
        if task not in answers.tasks and len(answers.tasks) < MOST_TASKS:
            answers.tasks.append(task)

    def take(self) -> dict[str, AnswerCounts]:
        """Return the counts by engine since the last call."""
        answers, self._answers = self._answers, {}
        return answers


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

    An engine without the current policy answers 503, and a router answers 5xx while an engine is being restarted. A
    request whose answer is damaged is repeated, too: such an answer says nothing of the request. The tally tells the
    orchestrator, which restarts an engine that gives many damaged answers.

    Args:
        where: the router's URL as it is now; a request that waits for an answer follows it when it changes.
        max_len: longest sequence an engine accepts; completions end there.
        timeout_s: longest wait for one answer, retries included.
        routed: answers must say which experts each token was routed to.
        tally: counts answers by engine.
        vocab: tokens of the model. None: that is unknown.
    """

    def __init__(
        self,
        where: Callable[[], str],
        max_len: int,
        timeout_s: float,
        routed: bool = False,
        tally: AnswerTally | None = None,
        vocab: int | None = None,
    ) -> None:
        self._where = where
        self._vocab = vocab
        self._tally = tally or AnswerTally()
        self._max_len = max_len
        self._timeout_s = timeout_s
        self._routed = routed
        self._http = Clients(lambda: internal_client(timeout_s))

    async def generate(self, body: dict[str, Any], headers: dict[str, str], path: str = GENERATE) -> Completion:
        """Sample one completion of `body["token_ids"]`.

        Raises:
            RefusedError: the request is wrong (4xx).
            NoAnswerError: no usable answer before the deadline. An answer that lacks tokens, log-probabilities, policy
                versions or routed experts is none.
        """
        first = body["sampling_params"].get(ROUTED_FROM, 0) if self._routed else None
        return await self._insist(path, self._request(body), headers, first)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @property
    def max_len(self) -> int:
        """Return the longest sequence that an engine accepts [tokens]."""
        return self._max_len

    @property
    def overflow(self) -> str:
        """Return the end of every message about a prompt that is too long, in words that harnesses recognise."""
        return f"this model's maximum context length is {self._max_len} tokens"

    def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = dict(body["sampling_params"])
        room = self._max_len - len(body["token_ids"])
        if room < 1:
            raise RefusedError(f"the prompt has {len(body['token_ids'])} tokens: {self.overflow}", 400)
        # Images take more tokens than are here, so this may be more than fits: the engine stops at its own limit.
        # Without max_tokens it would stop at the max_new_tokens of the model's generation config.
        sampling["max_tokens"] = min(sampling.get("max_tokens") or room, room)
        sampling["logprobs"] = 0  # the sampled token's own, no alternatives
        return {**body, "model": None, "sampling_params": sampling, "stream": False}

    async def _insist(
        self, path: str, request: dict[str, Any], headers: dict[str, str], routed_from: int | None
    ) -> Completion:
        try:
            return await retry_with_backoff(_NOT_NOW, self._timeout_s)(self._try, path, request, headers, routed_from)
        except _NOT_NOW as error:
            words = str(error) if isinstance(error, UnavailableError) else f"{type(error).__name__}: {error}"
            raise NoAnswerError(f"{NO_ANSWER}: {self._where()}{path}: {words}") from error

    async def _try(
        self, path: str, request: dict[str, Any], headers: dict[str, str], routed_from: int | None
    ) -> Completion:
        where = self._where()
        with self._http.one() as client:
            answer = await post_while(client, where + path, lambda: self._where() == where, request, headers)
        named = answer.headers.get(ENGINE_HEADER, "")
        engine, session = named or where.partition("//")[2], headers.get(SESSION_HEADER, "")
        if answer.is_success:
            try:
                completion = completion_of(answer.content, len(request["token_ids"]), routed_from)
                self._insist_on(completion.token_ids, request["sampling_params"]["max_tokens"])
            except DamagedError as error:
                self._tally.damaged(engine, session, str(error))
                raise UnavailableError(f"engine {engine} gave a damaged answer: {error}") from error
            self._tally.good(engine)
            return completion
        problem = f"{answer.status_code}: {words(answer)}"
        if answer.is_client_error and answer.status_code not in BUSY:
            raise RefusedError(problem, answer.status_code)
        if named and answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR:  # of the engine, and not of its router
            self._tally.damaged(engine, session, problem)
        raise UnavailableError(problem)

    def _insist_on(self, token_ids: list[int], most: int) -> None:
        """Raise DamagedError for tokens that the model does not have, and for more of them than were asked for."""
        if len(token_ids) > most:
            raise DamagedError(f"{len(token_ids)} tokens, although at most {most} were asked for")
        if self._vocab is not None and (largest := max(token_ids)) >= self._vocab:
            raise DamagedError(f"token {largest} is not in the vocabulary, which has {self._vocab}")


SESSION_HEADER = "X-Session-ID"
"""Names the trace that a request is of; routers pin it to an engine."""
LONGEST_REASON = 500
"""Characters of an engine's words that a report keeps."""
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


def completion_of(content: bytes, prompt: int, routed_from: int | None) -> Completion:
    """Read an engine's answer.

    Args:
        content: of the answer.
        prompt: tokens that were sent; an answer to images says how many there were.
        routed_from: the position from which on routed experts were asked for; None: they were not.

    Raises:
        DamagedError: it is no answer, or what it says of its tokens is not of as many as there are.
    """
    content, base64 = _take_routed_experts(content)
    try:
        answer = decode_json(content, _Answer)
    except DamagedError as error:
        raise DamagedError(f"an engine's answer is none: {error}") from error
    choice = answer.choices[0]
    sampled, logprobs = len(choice.token_ids), [entry.logprob for entry in choice.logprobs.content]
    if len(logprobs) != sampled or not all(-LARGEST_LOGPROB <= logprob <= HIGHEST_LOGPROB for logprob in logprobs):
        raise DamagedError(f"{len(logprobs)} log-probabilities for {sampled} tokens, or some that are none")
    if not sampled:
        raise DamagedError(f"no token, and finish reason {choice.finish_reason}")
    if choice.finish_reason in _UNFINISHED:
        raise DamagedError(f"finish reason {choice.finish_reason}: the engine gave the request up")
    if all(logprob <= NO_LOGPROB for logprob in logprobs):
        raise DamagedError(f"a log-probability of {logprobs[0]} for every token: no policy samples such tokens")
    # `renderers` refuses the very value; the nearest one is the same in float32, and the trainer masks such tokens
    logprobs = [_ALMOST_NO_LOGPROB if logprob == NO_LOGPROB else logprob for logprob in logprobs]
    prompt_ids, places = answer.prompt_token_ids, answer.mm_placeholders
    prompt = len(prompt_ids) if prompt_ids else prompt
    if any(
        place.get("offset", prompt) + place.get("length", 1) > prompt
        for kind in (places or {}).values()
        for place in kind
    ):
        raise DamagedError(f"an image beyond the {prompt} tokens of the prompt")
    completion = Completion(
        choice.token_ids, logprobs, _versions(choice), choice.finish_reason, prompt_ids=prompt_ids, placeholders=places
    )
    if routed_from is None:
        return completion
    experts = _routed_experts(choice, base64, prompt + sampled - routed_from)
    return replace(completion, routed_experts=experts, routed_from=routed_from)


def _versions(choice: _Choice) -> list[int]:
    versions: list[int] = []
    for span in choice.weight_versions:
        # vLLM's spans follow one another. Others do not say clearly which tokens they are of.
        if not len(versions) == span.start <= span.end <= len(choice.token_ids):
            text = f"a policy version of tokens {span.start} to {span.end} of {len(choice.token_ids)}"
            raise DamagedError(f"{text}, where those from {len(versions)} on follow")
        versions += [0 if span.version == LOADED_VERSION else int(span.version)] * (span.end - span.start)
    if len(versions) != len(choice.token_ids):
        raise DamagedError(f"{len(versions)} policy versions for {len(choice.token_ids)} tokens")
    return versions


_ALMOST_NO_LOGPROB = math.nextafter(NO_LOGPROB, 0.0)
_UNFINISHED = ("abort", "error")
_KEY = b'"routed_experts"'
_BEFORE_TEXT = re.compile(_KEY + rb'[ \t\r\n]*:[ \t\r\n]*"')
TAKEN = b"0"
"""What is put in place of routed experts."""


def _take_routed_experts(content: bytes) -> tuple[bytes, memoryview]:
    """Take the text of routed experts out of an answer, which a parser would look at character by character.

    It has neither quotes nor backslashes, and ends at the quote that is where its own header says, or is the next one.
    Whoever sends something else has sent an answer that is no JSON then, or experts that are no base64. Where it
    belongs to, the parser says.

    Returns:
        The answer, with TAKEN in its place, and the text. The answer as it came, and nothing, if there is not exactly
        one.
    """
    key = content.find(_KEY)
    text = _BEFORE_TEXT.match(content, key) if key > 0 and content[key - 1 : key] != b"\\" else None
    if text is None:
        return content, memoryview(b"")
    start = text.end()
    end = content.find(b'"', start + routed_experts.characters(memoryview(content)[start:]))
    if end < 0 or content.find(_KEY, end) >= 0:
        return content, memoryview(b"")
    return content[: start - 1] + TAKEN + content[end + 1 :], memoryview(content)[start:end]


def _routed_experts(choice: _Choice, taken: memoryview, tokens: int) -> RoutedExperts:
    """Read the .npy file [tokens - 1, layers, top_k] that vLLM sends: nothing was computed from the last token."""
    text = memoryview(choice.routed_experts)
    if text == TAKEN and taken:
        return routed_experts.from_npy(taken, tokens - 1, unknown=1)
    if bytes(text[:4]) == b"null":
        raise DamagedError("no routed experts: the engine runs without --enable-return-routed-experts")
    if bytes(text[:1]) != b'"':
        raise DamagedError("routed experts that are no text")
    return routed_experts.from_npy(text[1:-1], tokens - 1, unknown=1)

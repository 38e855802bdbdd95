"""Generation over HTTP: token ids to `/inference/v1/generate`, sampled tokens and their policy versions back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import aiohttp
import httpx
import msgspec

from primeslurm.orchestrator.rollouts.job_protocol import AnswerCounts, EngineError
from primeslurm.orchestrator.worker.router_session import RouterSession
from primeslurm.wire import cache_salt
from primeslurm.wire.batches import routed_experts
from primeslurm.wire.batches.rollout import LARGEST_LOGPROB, MAX_LOGPROB
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.decoding import Count, DamagedError, decode_json
from primeslurm.wire.names import ADAPTER, ENGINE_HEADER, GENERATE, SERVED_MODEL
from primeslurm.wire.transport.http import (
    BUSY,
    MovedError,
    UnavailableError,
    error_text,
    post_while,
)
from primeslurm.wire.transport.retry import retry_with_backoff

# Header with the id of a trace. verifiers' TrainClient sets it, and routers use it to pin a trace to an engine.
SESSION_HEADER = "X-Session-ID"
LOADED_VERSION = "default"  # vLLM's name for the weights it loaded at start, until it is told a version: version 0
NO_LOGPROB = -9999.0  # vLLM's value where it has no log-probability, and where a probability is 0
_ALMOST_NO_LOGPROB = math.nextafter(NO_LOGPROB, 0.0)
MAX_TASKS = 8  # tasks that a report of damaged answers names, enough to tell a bad engine from a bad prompt
LONGEST_REASON = 500  # characters of an engine's error text that a report keeps
# vLLM's name of the sampling parameter for the first position of the returned routed experts.
ROUTED_FROM = "routed_experts_prompt_start"
# Beginning of a NoAnswerError's text, by which it is recognised after verifiers has passed it on as text.
NO_ANSWER = "no engine answered"


class _VersionSpan(msgspec.Struct):
    version: Annotated[str, msgspec.Meta(pattern=rf"^({LOADED_VERSION}|[0-9]{{1,9}})$")]
    start: Count
    end: Count

    @property
    def number(self) -> int:
        return 0 if self.version == LOADED_VERSION else int(self.version)


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    token_ids: list[Count]
    logprobs: _Logprobs
    weight_versions: list[_VersionSpan] | None = None
    finish_reason: Annotated[str, msgspec.Meta(max_length=100)] | None = None
    # Raw, because a string of it would copy 100 MB of base64 for 131,072 tokens of 75 layers and 8 experts.
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")


class _TransferParams(msgspec.Struct):
    """What `inference.dynamo_worker` adds to an answer, because Dynamo's frontend drops it elsewhere."""

    weight_versions: list[_VersionSpan] = []


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    kv_transfer_params: _TransferParams | None = None
    prompt_token_ids: list[Count] | None = None
    mm_placeholders: dict[str, list[dict[str, Count]]] | None = None


class AnswerTally:
    """Counts of usable and damaged answers by engine, for a worker's reports."""

    def __init__(self) -> None:
        self._answers: dict[str, AnswerCounts] = {}
        self._tasks: dict[str, str] = {}

    def begin(self, session: str, task: str) -> None:
        self._tasks[session] = task

    def end(self, session: str) -> None:
        self._tasks.pop(session, None)

    def good(self, engine: str) -> None:
        self._answers.setdefault(engine, AnswerCounts()).good += 1

    def damaged(self, engine: str, session: str, error: str) -> None:
        answers = self._answers.setdefault(engine, AnswerCounts(tasks=[]))
        answers.damaged, answers.error = answers.damaged + 1, error[:LONGEST_REASON]
        task = self._tasks.get(session, session)
        if task not in answers.tasks and len(answers.tasks) < MAX_TASKS:
            answers.tasks.append(task)

    def take(self) -> dict[str, AnswerCounts]:
        """Return the counts by engine since the last call."""
        answers, self._answers = self._answers, {}
        return answers


class RefusedError(Exception):
    """The request is wrong, so a retry would not help."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class NoAnswerError(EngineError):
    """No engine gave a usable answer before the deadline."""


@dataclass(frozen=True)
class Completion:
    """The sampled tokens of one request. All lists have one entry per sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]  # policy version that sampled each token
    # Policy version of the prefill engine; None if there was none.
    prefill_version: int | None = field(default=None, kw_only=True)
    finish_reason: str | None = None
    # [tokens, layers, top_k] of prompt and sampled tokens, from position `routed_from` on.
    routed_experts: RoutedExperts | None = None
    routed_from: int = 0
    prompt_ids: list[int] | None = None  # the prompt with one placeholder per image token; None without images
    placeholders: dict[str, list[dict[str, int]]] | None = None  # `offset` and `length` of each image in `prompt_ids`


class GenerateEndpoint:
    """Posts requests to one router and retries them until the deadline.

    An engine without the current policy answers 503, and a router answers 5xx while an engine restarts. A request with
    a damaged answer is repeated, too, because the answer says nothing about the request. The tally tells the
    orchestrator, which restarts an engine that gives many damaged answers.

    Args:
        where: Returns the router's current URL. A waiting request follows it when it changes.
        max_len: Longest sequence that an engine accepts [tokens]. Completions end there.
        kv_aware: The router reads KV events, so it must not see cache salts.
        adapter: Ask for the policy's adapter instead of the model that engines loaded.
    """

    def __init__(
        self,
        where: Callable[[], str],
        max_len: int,
        timeout_s: float,
        routed: bool = False,
        tally: AnswerTally | None = None,
        vocab: int | None = None,
        kv_aware: bool = False,
        adapter: bool = False,
    ) -> None:
        self._where = where
        self._kv_aware = kv_aware
        self._model = ADAPTER if adapter else None
        self._vocab = vocab
        self._tally = tally or AnswerTally()
        self.max_len = max_len
        self._timeout_s = timeout_s
        self._routed = routed
        self._http = RouterSession(timeout_s)

    async def generate(
        self, body: dict[str, Any], headers: dict[str, str], path: str = GENERATE, extra: Mapping[str, str] = {}
    ) -> Completion:
        """Sample one completion of `body["token_ids"]`.

        `extra`: headers that replace or add to `headers`. The tally still counts by the session in `headers`.

        Raises:
            RefusedError: The request is wrong (4xx).
            NoAnswerError: No usable answer came before the deadline. An answer is usable if it has tokens with
                log-probabilities, policy versions and (if wanted) routed experts.
        """
        routed_from = body["sampling_params"].get(ROUTED_FROM, 0) if self._routed else None
        request = self._request(body)
        try:
            retrying = retry_with_backoff(_RETRIED, self._timeout_s)
            completion: Completion = await retrying(self._try, path, request, headers, routed_from, extra)
            return completion
        except _RETRIED as error:
            text = str(error) or f"no complete answer (request_timeout_s is {self._timeout_s})"
            text = text if isinstance(error, UnavailableError) else f"{type(error).__name__}: {text}"
            raise NoAnswerError(f"{NO_ANSWER}: {self._where()}{path}: {text}") from error

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def overflow(self) -> str:
        """Return the end of every message about a too long prompt, in words that harnesses recognise."""
        return f"this model's maximum context length is {self.max_len} tokens"

    def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = dict(body["sampling_params"])
        room = self.max_len - len(body["token_ids"])
        if room < 1:
            raise RefusedError(f"the prompt has {len(body['token_ids'])} tokens: {self.overflow}", 400)
        # Images take more tokens than are counted here, so this may be more than fits; the engine stops at its limit.
        # Without max_tokens it would stop at max_new_tokens of the model's generation config.
        sampling["max_tokens"] = min(sampling.get("max_tokens") or room, room)
        sampling["logprobs"] = 0  # only that of the sampled token
        request = {**body, "model": self._model, "sampling_params": sampling, "stream": False}
        # Without its model's name, a request to prefill engines gets no credit for cached blocks.
        return cache_salt.hide({**request, "model": SERVED_MODEL}) if self._kv_aware else request

    async def _try(
        self,
        path: str,
        request: dict[str, Any],
        headers: dict[str, str],
        routed_from: int | None,
        extra: Mapping[str, str],
    ) -> Completion:
        where, replaced = self._where(), {name.lower() for name in extra}
        sent = {name: value for name, value in headers.items() if name.lower() not in replaced} | dict(extra)
        answer = await post_while(self._http.post, where + path, lambda: self._where() == where, request, sent)
        named = answer.headers.get(ENGINE_HEADER, "")
        engine, session = named or where.partition("//")[2], headers.get(SESSION_HEADER, "")
        if httpx.codes.is_success(answer.status):
            try:
                completion = completion_of(answer.content, len(request["token_ids"]), routed_from)
                self._check_tokens(completion.token_ids, request["sampling_params"]["max_tokens"])
            except DamagedError as error:
                self._tally.damaged(engine, session, str(error))
                raise UnavailableError(f"engine {engine} gave a damaged answer: {error}") from error
            self._tally.good(engine)
            return completion
        problem = f"{answer.status}: {error_text(answer.content)}"
        if httpx.codes.is_client_error(answer.status) and answer.status not in _NO_ENGINE:
            raise RefusedError(problem, answer.status)
        # A 500 without the engine's header is from the router, which says nothing about an engine.
        if named and answer.status == httpx.codes.INTERNAL_SERVER_ERROR:
            self._tally.damaged(engine, session, problem)
        raise UnavailableError(problem)

    def _check_tokens(self, token_ids: list[int], most: int) -> None:
        if len(token_ids) > most:
            raise DamagedError(f"{len(token_ids)} tokens, although at most {most} were requested")
        if self._vocab is not None and (largest := max(token_ids)) >= self._vocab:
            raise DamagedError(f"token {largest} is not in the vocabulary, which has {self._vocab}")


# Dynamo's frontend answers 404 while it has no worker.
_NO_ENGINE = (*BUSY, httpx.codes.NOT_FOUND)
_RETRIED = (aiohttp.ClientError, TimeoutError, MovedError, UnavailableError)


def completion_of(content: bytes, prompt: int, routed_from: int | None) -> Completion:
    """Decode an engine's answer to `prompt` tokens. `routed_from`: first position of the requested routed experts."""
    # An answer to images has its own number of prompt tokens. Raises DamagedError if parts have different lengths.
    content, base64 = _take_routed_experts(content)
    try:
        answer = decode_json(content, _Answer)
    except DamagedError as error:
        raise DamagedError(f"an engine's answer is invalid: {error}") from error
    choice = answer.choices[0]
    sampled, logprobs = len(choice.token_ids), [entry.logprob for entry in choice.logprobs.content]
    if len(logprobs) != sampled or not all(-LARGEST_LOGPROB <= logprob <= MAX_LOGPROB for logprob in logprobs):
        raise DamagedError(f"{len(logprobs)} log-probabilities for {sampled} tokens, or some out of range")
    if not sampled:
        raise DamagedError(f"no token, and finish reason {choice.finish_reason}")
    if choice.finish_reason in _UNFINISHED:
        raise DamagedError(f"finish reason {choice.finish_reason}: the engine gave the request up")
    if all(logprob <= NO_LOGPROB for logprob in logprobs):
        raise DamagedError(f"a log-probability of {logprobs[0]} for every token: no policy samples such tokens")
    # `renderers` refuses exactly this value. The nearest one is equal in float32, and the trainer masks such tokens.
    logprobs = [_ALMOST_NO_LOGPROB if logprob == NO_LOGPROB else logprob for logprob in logprobs]
    prompt_ids, placeholders = answer.prompt_token_ids, answer.mm_placeholders
    prompt = len(prompt_ids) if prompt_ids else prompt
    for image in (image for kind in (placeholders or {}).values() for image in kind):
        if image.get("offset", prompt) + image.get("length", 1) > prompt:
            raise DamagedError(f"an image beyond the {prompt} tokens of the prompt")
    spans = choice.weight_versions
    if spans is None:
        spans = answer.kv_transfer_params.weight_versions if answer.kv_transfer_params else []
    completion = Completion(
        choice.token_ids,
        logprobs,
        _versions(choice, spans),
        choice.finish_reason,
        prefill_version=_prefill_version(spans),
        prompt_ids=prompt_ids,
        placeholders=placeholders,
    )
    if routed_from is None:
        return completion
    experts = _routed_experts(choice, base64, prompt + sampled - routed_from)
    return replace(completion, routed_experts=experts, routed_from=routed_from)


def _prefill_version(spans: list[_VersionSpan]) -> int | None:
    """Return the version of the empty span that a decode engine begins with (primeslurm/inference/prefill_version)."""
    return spans[0].number if spans and spans[0].end == 0 else None


def _versions(choice: _Choice, spans: list[_VersionSpan]) -> list[int]:
    versions: list[int] = []
    for span in spans:
        # vLLM's spans are contiguous. Others would not say clearly which tokens they are for.
        if not len(versions) == span.start <= span.end <= len(choice.token_ids):
            text = f"a policy version of tokens {span.start} to {span.end} of {len(choice.token_ids)}"
            raise DamagedError(f"{text}, where token {len(versions)} is the next")
        versions += [span.number] * (span.end - span.start)
    if len(versions) != len(choice.token_ids):
        raise DamagedError(f"{len(versions)} policy versions for {len(choice.token_ids)} tokens")
    return versions


_UNFINISHED = ("abort", "error")
_KEY = b'"routed_experts"'
_BEFORE_TEXT = re.compile(_KEY + rb'[ \t\r\n]*:[ \t\r\n]*"')
_TAKEN = b"0"  # replaces the text of routed experts that was taken out of an answer


def _take_routed_experts(content: bytes) -> tuple[bytes, memoryview]:
    """Take the text of routed experts out of an answer. Return the answer with _TAKEN in its place, and the text."""
    # A JSON parser would scan its 100 MB by character. Base64 has neither quotes nor backslashes. The text ends at the
    # quote where its own header says, or at the next one. If the content is something else, the result is no JSON, or
    # the text no base64, and decoding fails. Unless there is exactly one such text, the answer is unchanged.
    key = content.find(_KEY)
    match = _BEFORE_TEXT.match(content, key) if key > 0 and content[key - 1 : key] != b"\\" else None
    if match is None:
        return content, memoryview(b"")
    start = match.end()
    end = content.find(b'"', start + routed_experts.characters(memoryview(content)[start:]))
    if end < 0 or content.find(_KEY, end) >= 0:
        return content, memoryview(b"")
    return content[: start - 1] + _TAKEN + content[end + 1 :], memoryview(content)[start:end]


def _routed_experts(choice: _Choice, taken: memoryview, tokens: int) -> RoutedExperts:
    # vLLM sends one token less, because nothing was computed from the last one.
    text = memoryview(choice.routed_experts)
    if text == _TAKEN and taken:
        return routed_experts.from_npy(taken, tokens - 1, unknown=1)
    if bytes(text[:4]) == b"null":
        raise DamagedError("no routed experts: the engine runs without --enable-return-routed-experts")
    if bytes(text[:1]) != b'"':
        raise DamagedError("routed experts that are not a string")
    return routed_experts.from_npy(text[1:-1], tokens - 1, unknown=1)

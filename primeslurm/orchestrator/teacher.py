"""The teacher: a frozen model that scores complete groups.

`Teacher` sends token ids to `/v1/completions` and gets the log-probability of each token. `Scoring` asks it about all
tokens that a group trains.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import httpx
import msgspec
import numpy as np

from primeslurm.base.errors import PrimeslurmError
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import SpooledGroup
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.teacher import PolicyTeacher, ServedTeacher
from primeslurm.records.events.training import Stalled
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import Row
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.frames import Float32
from primeslurm.wire.batches.rollout import LARGEST_LOGPROB, Rollout, TeacherPrompt
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.transport.http import (
    BUSY,
    MovedError,
    UnavailableError,
    error_text,
    external_client,
    internal_client,
    post_while,
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
            answer = await post_while(self._http.post, f"{url}/completions", lambda: url in self._where(), body)
        except (httpx.HTTPError, MovedError):
            answer = None
        finally:
            self._inflight[url] -= 1
        if answer is not None and answer.is_success:
            self._avoided.pop(url, None)
            return url, answer
        if answer is not None and answer.is_client_error and answer.status_code not in BUSY:
            raise TeacherError(f"{url}: the teacher refuses: {answer.status_code} {error_text(answer.content)}")
        self._avoided[url] = self._clock() + AVOID_S
        raise UnavailableError(f"{url}: no answer")


def _logprobs_in(content: bytes, token_ids: Sequence[int]) -> Float32:
    """Decode an answer about a prompt of these tokens. Raise LookupError or ValueError if it does not fit them."""
    # This takes 0.1 s for 131,072 tokens, so it runs in a thread. Entries are decoded one by one, because decoding all
    # at once would hold the interpreter's lock.
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
    timeout_s = recipe.orchestrator.request_s
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


class Scoring:
    """Scores groups in the order of their completion, up to `concurrency` sequences at once.

    Args:
        seq_len: Tokens after it are not trained, and not scored.
        on_scored: Called with each scored group, unless it was dropped.
        longest: Maximum number of tokens of a request. Default: seq_len.
        on_damaged: Called with a group on disk that cannot be read, and the error.
    """

    def __init__(
        self,
        teacher: Teacher,
        concurrency: int,
        seq_len: int,
        on_scored: Callable[[RolloutGroup], None],
        clock: Callable[[], float] = time.monotonic,
        longest: int | None = None,
        on_damaged: Callable[[RolloutGroup, DamagedError], None] = lambda group, error: None,
    ) -> None:
        self._teacher = teacher
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._in_progress = 0  # sequences of groups that are being scored
        self._progressed = asyncio.Event()
        self._seq_len = seq_len
        self._longest = longest or seq_len
        self._on_scored = on_scored
        self._on_damaged = on_damaged
        self._clock = clock
        self._added: asyncio.Queue[RolloutGroup] = asyncio.Queue()
        self._wanted: dict[str, asyncio.Task[None] | None] = {}  # scoring task by group; None before it starts
        self._seconds = 0.0
        self._tokens = 0
        self._unscored = 0

    def add(self, group: RolloutGroup) -> None:
        self._wanted[group.id] = None
        self._added.put_nowait(group)

    def drop(self, groups: Iterable[RolloutGroup]) -> None:
        """Stop scoring groups. Unknown groups are ignored."""
        for group in groups:
            if (task := self._wanted.pop(group.id, None)) is not None:
                task.cancel()

    async def run(self, journal: Journal) -> None:
        """Score until cancelled. If the teacher refuses, write an event and raise an ExceptionGroup of TeacherError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    group = await self._read(await self._added.get())
                    if group is not None and group.id in self._wanted:
                        self._wanted[group.id] = task = tasks.create_task(self._score(group, journal))
                        self._note_progress(len(group.sequences))
                        task.add_done_callback(functools.partial(self._note_progress, -len(group.sequences)))
        finally:
            await self._teacher.close()

    def take_metrics(self) -> Row:
        """Return the metrics since the last call. teacher/seconds is the sum over all requests."""
        row = {
            "teacher/seconds": self._seconds,
            "teacher/tokens": float(self._tokens),
            "teacher/unasked_tokens": float(self._unscored),
            "teacher/waiting": float(len(self._wanted)),
        }
        self._seconds, self._tokens, self._unscored = 0.0, 0, 0
        return row

    def _note_progress(self, sequences: int, _task: object = None) -> None:
        self._in_progress += sequences
        self._progressed.set()

    async def _read(self, group: RolloutGroup) -> RolloutGroup | None:
        """Return a group with its arrays in memory, or None if it was dropped or is damaged."""
        if not isinstance(group, SpooledGroup):
            return group
        # Read early enough that the teacher does not wait, but not much earlier, to save memory.
        while self._in_progress >= 2 * self._concurrency:
            self._progressed.clear()
            await self._progressed.wait()
        if group.id not in self._wanted:
            return None
        try:
            return await asyncio.to_thread(group.whole)
        except DamagedError as error:
            if group.id in self._wanted:
                self._wanted.pop(group.id)
                self._on_damaged(group, error)
        return None

    async def _score(self, group: RolloutGroup, journal: Journal) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                scored = [[tasks.create_task(self._sequence(one)) for one in rollout] for rollout in group.rollouts]
        except* TeacherError as errors:
            journal.write(Stalled("teacher", str(errors.exceptions[0])))
            raise
        self._wanted.pop(group.id, None)
        rollouts = tuple(tuple(task.result() for task in rollout) for rollout in scored)
        self._on_scored(replace(group, rollouts=rollouts))

    async def _sequence(self, rollout: Rollout) -> Rollout:
        prompt = rollout.info.teacher_prompt or TeacherPrompt([], 0)
        extra = len(prompt.token_ids) - prompt.replaces
        trained = min(len(rollout.token_ids), self._seq_len)
        length = max(prompt.replaces, min(trained, self._longest - extra))
        logprobs = np.zeros(len(rollout.token_ids), np.float32)
        # For tokens that do not fit into the request, the teacher's log-probabilities are taken to equal the policy's.
        logprobs[length:trained] = np.where(rollout.mask, rollout.logprobs, 0)[length:trained]
        async with self._slots:
            started = self._clock()
            tokens = [*prompt.token_ids, *rollout.token_ids[prompt.replaces : length].tolist()][: self._longest]
            answer = await self._teacher.logprobs(tokens)
            self._seconds += self._clock() - started
        self._tokens += len(tokens)
        self._unscored += int(rollout.mask[length:trained].sum())
        tail = slice(prompt.replaces, length)
        logprobs[tail] = np.where(rollout.mask[tail], answer[len(prompt.token_ids) :], 0)
        return replace(rollout, ref_logprobs=logprobs)


def scoring_of(
    recipe: Recipe,
    arguments: OrchestratorArguments,
    waiting: Iterable[RolloutGroup],
    on_scored: Callable[[RolloutGroup], None],
    on_damaged: Callable[[RolloutGroup, DamagedError], None],
) -> Scoring | None:
    """Create the scoring of a recipe, with the groups that wait already. None: the recipe has no teacher."""
    if recipe.teacher is None:
        return None
    # Each request needs room for one token more. Engines of the run accept no longer sequences for a hint.
    longest = recipe.max_len - 1 if isinstance(recipe.teacher, PolicyTeacher) else recipe.seq_len
    teacher = teacher_of(recipe, arguments)
    options = (recipe.teacher.concurrency, recipe.seq_len, on_scored)
    scoring = Scoring(teacher, *options, longest=longest, on_damaged=on_damaged)
    for group in waiting:
        scoring.add(group)
    return scoring

"""The client through which verifiers environments reach the engines, with token ids in and out.

`verifiers.v1.clients.TrainClient` renders messages to token ids (extending the sampled tokens of earlier turns), posts
them to `/inference/v1/generate`, and records sampled tokens, log-probabilities and routed experts in the trace. It does
not keep policy versions, does not retry, and expects other formats of log-probabilities and routed experts than vLLM
0.32 sends. `RendererEndpoint` adds this behind the only method of its HTTP client that it uses: `post`.

verifiers expects routed experts as base64 in JSON. They are decoded already, and encoding and decoding 100 MB (131,072
tokens of 75 layers and 8 experts) would block the event loop of all rollouts of a worker. So traces get arrays instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec
from openai import APIConnectionError, APIStatusError
from pydantic._internal import _fields
from verifiers.v1 import graph
from verifiers.v1.clients import Client, TrainClient, TrainClientConfig, train
from verifiers.v1.clients.train import RendererSlot
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.env import Env
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import InterceptionServer, server
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace
from verifiers.v1.types import Response, SamplingConfig
from verifiers.v1.utils import decorators, loaders

from primeslurm.orchestrator.environments.chat import servers_in_process
from primeslurm.orchestrator.rendering import context_window
from primeslurm.orchestrator.rendering.context_window import (
    ENGINE_OVERFLOW,
    OVERFLOW,
    ContextOverflowError,
    model_cards,
)
from primeslurm.orchestrator.rendering.conversation_cache import cache_conversations
from primeslurm.orchestrator.rendering.program_protocols import ROLLOUT_DIALECTS, TrainedDialect
from primeslurm.orchestrator.rendering.renderer_selection import Rendering, select_renderer
from primeslurm.orchestrator.worker.generate_endpoint import (
    SESSION_HEADER,
    AnswerTally,
    Completion,
    GenerateEndpoint,
    NoAnswerError,
    RefusedError,
)
from primeslurm.recipe.rules import sampling as sampling_rules
from primeslurm.wire.batches.routed_experts import RoutedExperts

T = TypeVar("T")

# Rollouts that share a renderer: all of a worker, because rendering a turn's new messages takes milliseconds.
MULTIPLEX = 1_000_000

# Maximum size of a request of a program to its model. A million tokens have about five megabytes, images have more.
LARGEST_REQUEST_BYTES = 128 << 20

# Characters of a prompt that the event loop renders itself, in less than 0.5 ms.
SHORT_PROMPT = 1000

# A message keeps a view of a turn's experts if the turn's new messages have at least this fraction of its rows.
# Otherwise it keeps a copy, so that the other rows can be freed.
VIEW_FRACTION = 0.5


class TurnRows(NamedTuple):
    """Routed experts of a turn, in place of verifiers' own format."""

    rows: RoutedExperts  # [tokens, layers, top_k]; those of the last token are unknown
    start: int  # position of the first row's token in the sequence


# True if the turn that this context requests has a short prompt.
is_short: ContextVar[bool] = ContextVar("is_short", default=False)
# Receives the routed experts of the turn that this context requests.
posted: ContextVar[list[TurnRows] | None] = ContextVar("posted", default=None)


@dataclass(frozen=True)
class Reply:
    """Body of an answer in the format that `renderers` reads."""

    content: bytes


class RendererEndpoint:
    """The HTTP client of a TrainClient: it posts through a GenerateEndpoint and keeps the completions."""

    def __init__(self, base_url: str, endpoint: GenerateEndpoint, model: str) -> None:
        self.base_url = base_url
        self._endpoint = endpoint
        self._model = model
        self._completions: dict[str, list[Completion]] = {}
        self._extra_headers: dict[str, Mapping[str, str]] = {}

    async def get(self, path: str, cast_to: Any) -> dict[str, Any]:
        return model_cards(self._model, self._endpoint.max_len)

    async def post(self, url: str, cast_to: Any, body: dict[str, Any], options: Mapping[str, Any]) -> Reply:
        """Generate a completion.

        Raise APIStatusError if the request is wrong (4xx), and APIConnectionError if there was no usable answer before
        the deadline.
        """
        headers = dict(options["headers"])
        try:
            extra = self._extra_headers.get(headers[SESSION_HEADER], {})
            completion = await self._endpoint.generate(body, headers, url.removeprefix(self.base_url), extra)
        except RefusedError as error:
            text, response = str(error), httpx.Response(error.status, request=httpx.Request("POST", url))
            if error.status == httpx.codes.BAD_REQUEST and ENGINE_OVERFLOW in text:
                text = f"{text}: {self._endpoint.overflow}"
            raise APIStatusError(text, response=response, body=None) from error
        except NoAnswerError as error:
            raise APIConnectionError(message=str(error), request=httpx.Request("POST", url)) from error
        if completion.routed_experts is not None and (turns := posted.get()) is not None:
            turns.append(TurnRows(completion.routed_experts, completion.routed_from))
        # The trace keeps the routed experts. They are too large to be kept here, too.
        small = replace(completion, routed_experts=None, prompt_ids=None, placeholders=None)
        self._completions.setdefault(headers[SESSION_HEADER], []).append(small)
        return _reply(completion)

    def begin(self, session: str, extra_headers: Mapping[str, str]) -> None:
        """Send these headers with the requests of a session, until `take`."""
        self._extra_headers[session] = extra_headers

    def take(self, session: str) -> list[Completion]:
        self._extra_headers.pop(session, None)
        return self._completions.pop(session, [])

    async def close(self) -> None:
        await self._endpoint.close()


class TokenClient(TrainClient):  # type: ignore[misc]
    """A TrainClient that posts through a RendererEndpoint.

    Args:
        images: Messages may have images. Raises ValueError if `renderers` cannot render images for the model.
        rendering: How to render messages. Default: `select_renderer` chooses it by model.
        trained: The recipe's sampling parameters, which requests of trained agents must not change. None: no agent is
            trained.
    """

    def __init__(
        self,
        router: str,
        where: Callable[[], str],
        model: str,
        max_len: int,
        timeout_s: float,
        *,
        routed: bool = False,
        images: bool = False,
        rendering: Rendering | None = None,
        trained: Mapping[str, object] | None = None,
        tally: AnswerTally | None = None,
        vocab: int | None = None,
        kv_aware: bool = False,
        adapter: bool = False,
    ) -> None:
        rendering = rendering or select_renderer(model, images=images)
        config = TrainClientConfig(
            base_url=f"http://{router}",
            api_key_var="UNUSED",
            renderer_model_name=model,
            renderer=rendering.config,
            multiplex=MULTIPLEX,
        )
        super().__init__(config)
        self.key = config.model_dump_json()
        endpoint = GenerateEndpoint(where, max_len, timeout_s, routed, tally, vocab, kv_aware, adapter)
        self.endpoint = RendererEndpoint(config.base_url, endpoint, model)
        self.client = self.endpoint
        if routed:
            take_arrays()
        self._no_tools = rendering.no_tools
        self._trained = trained

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Sample the next message of a conversation.

        Raise ContextOverflowError if the prompt leaves no room for an answer, and ProviderError if the model's renderer
        cannot render the offered tools, the environment samples with other parameters than the recipe, or the engine
        refuses the request.
        """
        self._refuse_other_sampling(sampling, turn)
        if self._no_tools and turn is not None and turn.tools:
            raise ProviderError(self._no_tools, status_code=400)
        rows: list[TurnRows] = []
        token = posted.set(rows)
        is_short.set(_has_short_prompt(turn))  # of this request's own task
        chat_dialect = ChatDialect() if isinstance(dialect, TrainedDialect) else dialect
        try:
            response = await super().get_response(chat_dialect, body, sampling, session_id, turn, headers)
        except ProviderError as error:
            if error.status_code == httpx.codes.BAD_REQUEST and OVERFLOW in str(error):
                raise ContextOverflowError(str(error), status_code=error.status_code) from error
            raise
        finally:
            posted.reset(token)
        if isinstance(dialect, TrainedDialect):
            dialect.answer(response)
        if rows and response.tokens is not None:
            response.tokens.routed_experts = rows[-1]
        return response

    def _refuse_other_sampling(self, sampling: SamplingConfig, turn: PendingTurn | None) -> None:
        agent = turn.trace.agent if turn is not None else None
        if self._trained is None or (agent is not None and not agent.trainable):
            return
        requested = sampling.model_dump(exclude_none=True)
        if names := sampling_rules.changes(requested, self._trained):
            given = ", ".join(f"{name} = {requested.get(name)}" for name in names)
            why = "the trainer computes log-probabilities as the recipe samples, so importance ratios would be wrong"
            fix = "set environments.sampling.temperature, leave all else out of the environment"
            raise ProviderError(f"the environment samples with {given}: {why} ({fix})", status_code=400)


def limit_requests() -> None:
    """Lower verifiers' limit of a gigabyte per request of a program, because a worker has hundreds of programs."""
    server.MAX_REQUEST_BODY = LARGEST_REQUEST_BYTES


class PromptSlot(RendererSlot):  # type: ignore[misc]
    """A renderer that renders short prompts at once: to wake a thread takes longer."""

    async def run(self, fn: Callable[[], T]) -> T:
        if is_short.get() and self.lock.acquire(blocking=False):
            try:
                return fn()
            finally:
                self.lock.release()
        result: T = await super().run(fn)
        return result


def _has_short_prompt(turn: PendingTurn | None) -> bool:
    if turn is None or turn.tools:
        return False
    texts = [message.content for message in turn.prompt]
    return all(isinstance(text, str) for text in texts) and sum(map(len, texts)) <= SHORT_PROMPT


@functools.cache
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(MethodType(function, object()))


_hash: Callable[[Task], str] = Task.hash.fget


def _hash_once(task: Task) -> str:
    """Return a task's hash, computed once for its data, which `with_data` replaces."""
    known: tuple[Any, str] | None = vars(task).get("_hash_of_data")
    if known is None or known[0] is not task.data:
        known = vars(task)["_hash_of_data"] = task.data, _hash(task)
    return known[1]


class _Signatures:
    """In place of `inspect` in `verifiers.v1.utils.decorators`: it reads the signature of a method once."""

    @staticmethod
    def signature(function: Callable[..., Any]) -> inspect.Signature:
        method = getattr(function, "__func__", None)
        return inspect.signature(function) if method is None else _signature_of_method(method)


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    remembered = functools.lru_cache(1024)(function)

    def call(argument: Any) -> Any:
        try:
            return remembered(argument)
        except TypeError:  # it cannot be hashed
            return function(argument)

    call.remembered = remembered  # type: ignore[attr-defined]
    return functools.wraps(function)(call)


def inspect_once() -> None:
    """Let verifiers and pydantic inspect hooks, harnesses, default values and tasks once, not for each rollout."""
    decorators.inspect = _Signatures
    for module, name in ((loaders, "harness_class"), (_fields, "takes_validated_data_argument")):
        function = getattr(module, name)
        if not hasattr(function, "remembered"):
            setattr(module, name, _remembering(function))
    Task.hash = property(_hash_once)
    train.RendererSlot = PromptSlot


@asynccontextmanager
async def serving(env: Env) -> AsyncIterator[dict[str, Client]]:
    """Enter `env.serving()`, and yield its clients by config, to which callers add TokenClients."""
    # verifiers creates clients from configs and has no way to register another class. Its interception server keeps one
    # client per config, so ours must be there before the first rollout uses its config.
    limit_requests()
    inspect_once()
    context_window.install()
    async with env.serving():
        interception = env._interception
        if not isinstance(interception, InterceptionServer):
            raise TypeError(f"the environment must use interception type 'server', not {type(interception).__name__}")
        cache_conversations(interception, ROLLOUT_DIALECTS)
        servers_in_process.add(interception)
        yield interception.clients


def take_arrays() -> None:
    """Let verifiers accept arrays of routed experts."""
    graph._attribute_routed_experts = _attribute


_attribute_encoded = graph._attribute_routed_experts


def _attribute(trace: Trace, prefix: list[int], new: list[int], path_len: int, payload: Any) -> None:
    """Give each new message of a turn its rows, in place of `graph._attribute_routed_experts`.

    `new`: indices of the nodes that the turn added, the answer last.
    """
    if not isinstance(payload, TurnRows):
        _attribute_encoded(trace, prefix, new, path_len, payload)
        return
    rows, offset = payload.rows, path_len - payload.start
    _complete_last(trace, prefix, rows, offset)
    viewed = sum(len(trace.nodes[index].token_ids) for index in new) >= VIEW_FRACTION * len(rows)
    for index in new:
        end = offset + len(trace.nodes[index].token_ids)
        if 0 <= offset < end <= len(rows):
            trace.nodes[index].routed_experts = rows[offset:end] if viewed else rows[offset:end].copy()
        offset = end


def _complete_last(trace: Trace, prefix: Sequence[int], rows: RoutedExperts, offset: int) -> None:
    """Fill in the last token of the previous answer, which is routed only when the next turn is computed."""
    last = next((trace.nodes[index] for index in reversed(prefix) if trace.nodes[index].token_ids), None)
    if last is None or not last.sampled or last.routed_experts is None or not 1 <= offset <= len(rows):
        return
    experts: RoutedExperts = last.routed_experts
    if experts.shape[1:] == rows.shape[1:] and experts.dtype == rows.dtype and len(experts):
        experts[-1] = rows[offset - 1]


def _reply(completion: Completion) -> Reply:
    # `renderers` 0.1 reads log-probabilities as vLLM sends them in text mode: tokens as `token_id:N`.
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": {"content": content},
    }
    answer: dict[str, Any] = {"choices": [choice]}
    if completion.prompt_ids is not None:
        answer |= {"prompt_token_ids": completion.prompt_ids, "mm_placeholders": completion.placeholders}
    return Reply(msgspec.json.encode(answer))

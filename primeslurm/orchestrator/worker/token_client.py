"""Token-in, token-out for verifiers: the client through which its environments reach the engines.

`verifiers.v1.clients.TrainClient` renders messages to token ids (extending the sampled tokens of earlier turns as they
are), posts them to `/inference/v1/generate`, and records sampled tokens, log-probabilities and routed experts in the
trace. It neither keeps policy versions nor tries again, and reads other shapes of log-probabilities and routed experts
than vLLM 0.32 sends. All this is mended behind the one thing it asks of its HTTP client: `post`.

verifiers takes routed experts as base64 within JSON, which would have to be made of what is decoded already: 100 MB for
131,072 tokens of 75 layers and 8 experts, encoded and decoded on the event loop of every rollout of a worker. Here
messages of its traces get them as arrays.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import httpx
import msgspec
import verifiers.v1 as vf
from openai import APIConnectionError, APIStatusError
from verifiers.v1 import graph
from verifiers.v1.clients import Client, TrainClient, TrainClientConfig
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import InterceptionServer, server
from verifiers.v1.trace import Trace
from verifiers.v1.types import Response, SamplingConfig

from primeslurm.orchestrator.rendering import context_window
from primeslurm.orchestrator.rendering.context_window import (
    ENGINE_OVERFLOW,
    OVERFLOW,
    ContextOverflowError,
    model_cards,
)
from primeslurm.orchestrator.rendering.conversation_cache import cache_conversations
from primeslurm.orchestrator.rendering.dialects import ROLLOUT_DIALECTS, TrainedDialect
from primeslurm.orchestrator.rendering.renderer_selection import Rendering, select_renderer
from primeslurm.orchestrator.worker.generate_endpoint import (
    SESSION_HEADER,
    AnswerTally,
    Completion,
    GenerateEndpoint,
    NoAnswerError,
    RefusedError,
)
from primeslurm.recipe import sampling_rules
from primeslurm.wire.batches.routed_experts import RoutedExperts

MULTIPLEX = 1_000_000
"""Rollouts that share a renderer: all of a worker. It is asked for what is new of a turn, which takes milliseconds."""

LARGEST_QUESTION = 128 << 20
"""Bytes of what a program asks a model at once: a million tokens are some five megabytes, images take more."""

VIEWED = 0.5
"""A message's rows are a view of the turn's if the turn's new messages have this share of them: nothing else, or
little, is kept with them."""


class TurnRows(NamedTuple):
    """What an engine said of a turn, in the place where verifiers has its own of it."""

    rows: RoutedExperts
    """[tokens, layers, top_k]; of its last token nothing is known."""
    start: int
    """Position of the first of its tokens in the sequence."""


posted: ContextVar[list[TurnRows] | None] = ContextVar("posted", default=None)
"""Takes what the turn that is asked for in this context was answered."""


@dataclass(frozen=True)
class Reply:
    """The body of an answer in the shape that `renderers` reads."""

    content: bytes


class RendererEndpoint:
    """What a TrainClient takes for its HTTP client: posts through a GenerateEndpoint and keeps what was sampled.

    Args:
        base_url: stands for the router in the URLs that are posted to.
        endpoint: of the router.
        model: name of the model in requests.
    """

    def __init__(self, base_url: str, endpoint: GenerateEndpoint, model: str) -> None:
        self.base_url = base_url
        self._endpoint = endpoint
        self._model = model
        self._completions: dict[str, list[Completion]] = {}

    async def get(self, path: str, cast_to: Any) -> dict[str, Any]:
        """Answer `renderers`, which asks for the models: the one there is, and its context window."""
        return model_cards(self._model, self._endpoint.max_len)

    async def post(self, url: str, cast_to: Any, body: dict[str, Any], options: Mapping[str, Any]) -> Reply:
        """Generate.

        Raises:
            APIStatusError: the request is wrong (4xx).
            APIConnectionError: no usable answer before the deadline.
        """
        headers = dict(options["headers"])
        request = httpx.Request("POST", url)
        try:
            completion = await self._endpoint.generate(body, headers, url.removeprefix(self.base_url))
        except RefusedError as error:
            text, response = str(error), httpx.Response(error.status, request=request)
            if error.status == httpx.codes.BAD_REQUEST and ENGINE_OVERFLOW in text:
                text = f"{text}: {self._endpoint.overflow}"
            raise APIStatusError(text, response=response, body=None) from error
        except NoAnswerError as error:
            raise APIConnectionError(message=str(error), request=request) from error
        if completion.routed_experts is not None and (turns := posted.get()) is not None:
            turns.append(TurnRows(completion.routed_experts, completion.routed_from))
        # The trace keeps the routed experts; they are too large to be kept twice.
        kept = replace(completion, routed_experts=None, prompt_ids=None, placeholders=None)
        self._completions.setdefault(headers[SESSION_HEADER], []).append(kept)
        return _reply(completion)

    def take(self, session: str) -> list[Completion]:
        """Return all completions of a session (a verifiers trace id) so far, and forget them."""
        return self._completions.pop(session, [])

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


class TokenClient(TrainClient):  # type: ignore[misc]
    """A TrainClient that talks through a RendererEndpoint.

    Args:
        router: process name of the router.
        where: gives its URL as it is now.
        model: the directory of the tokenizer.
        max_len: longest sequence an engine accepts.
        timeout_s: longest wait for one answer, retries included.
        routed: answers must say which experts each token was routed to.
        images: messages may have images; raises ValueError if the model is none whose messages `renderers` renders.
        rendering: how messages are rendered. Default: as `choosing.choose` has it of the model.
        trained: sampling parameters that the recipe says, which requests of trained agents must not change. None:
            nothing is trained.
        tally: counts answers by engine.
        vocab: tokens of the model. None: that is unknown.
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
        endpoint = GenerateEndpoint(where, max_len, timeout_s, routed, tally, vocab)
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

        Raises:
            ContextOverflowError: the prompt leaves no room for an answer.
            ProviderError: tools are offered, and cannot be rendered; the environment samples otherwise than the recipe
                says; or whatever else the engine refuses.
        """
        self._refuse_other_sampling(sampling, turn)
        if self._no_tools and turn is not None and turn.tools:
            raise ProviderError(self._no_tools, status_code=400)
        rows: list[TurnRows] = []
        token = posted.set(rows)
        spoken = ChatDialect() if isinstance(dialect, TrainedDialect) else dialect
        try:
            response = await super().get_response(spoken, body, sampling, session_id, turn, headers)
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
        """Raise ProviderError if the code of an environment changed the distribution of an agent that is trained."""
        agent = turn.trace.agent if turn is not None else None
        if self._trained is None or (agent is not None and not agent.trainable):
            return
        asked = sampling.model_dump(exclude_none=True)
        if names := sampling_rules.changes(asked, self._trained):
            given = ", ".join(f"{name} = {asked.get(name)}" for name in names)
            why = "the trainer computes log-probabilities as the recipe samples, so importance ratios would be wrong"
            fix = "set environments.sampling.temperature, leave all else out of the environment"
            raise ProviderError(f"the environment samples with {given}: {why} ({fix})", status_code=400)


def bound_questions() -> None:
    """Have interception servers of this process take no longer questions than a model can be asked.

    verifiers takes a gigabyte of any program, and a worker has hundreds of them.
    """
    server.MAX_REQUEST_BODY = LARGEST_QUESTION


@asynccontextmanager
async def serving(env: vf.Env) -> AsyncIterator[dict[str, Client]]:
    """`env.serving()`; yields the clients by config, to put ours among them.

    verifiers builds clients from configs and offers no place to register another class. Its interception server keeps
    one client per config, so ours is put there before the first rollout that names its config. Raises TypeError if
    `env` is not configured with a single interception server.
    """
    bound_questions()
    context_window.install()
    async with env.serving():
        found = env._interception
        if not isinstance(found, InterceptionServer):
            raise TypeError(f"the environment must use interception type 'server', not {type(found).__name__}")
        cache_conversations(found, ROLLOUT_DIALECTS)
        yield found.clients


def take_arrays() -> None:
    """Have verifiers take arrays."""
    graph._attribute_routed_experts = _attribute


_attribute_encoded = graph._attribute_routed_experts


def _attribute(trace: Trace, prefix: list[int], new: list[int], path_len: int, payload: Any) -> None:
    """`graph._attribute_routed_experts`: give each message that the turn has added the rows of its own tokens.

    Args:
        trace: of the rollout.
        prefix: its messages that the turn began with, as places among its nodes.
        new: those that the turn has added, the answer last.
        path_len: tokens of the prefix.
        payload: of the turn.
    """
    if not isinstance(payload, TurnRows):
        _attribute_encoded(trace, prefix, new, path_len, payload)
        return
    rows, off = payload.rows, path_len - payload.start
    _know_last(trace, prefix, rows, off)
    viewed = sum(len(trace.nodes[place].token_ids) for place in new) >= VIEWED * len(rows)
    for place in new:
        end = off + len(trace.nodes[place].token_ids)
        if 0 <= off < end <= len(rows):
            trace.nodes[place].routed_experts = rows[off:end] if viewed else rows[off:end].copy()
        off = end


def _know_last(trace: Trace, prefix: Sequence[int], rows: RoutedExperts, off: int) -> None:
    """The last token of an answer is routed when the next turn is computed, whose rows begin with it."""
    last = next((trace.nodes[place] for place in reversed(prefix) if trace.nodes[place].token_ids), None)
    if last is None or not last.sampled or last.routed_experts is None or not 1 <= off <= len(rows):
        return
    known: RoutedExperts = last.routed_experts
    if known.shape[1:] == rows.shape[1:] and known.dtype == rows.dtype and len(known):
        known[-1] = rows[off - 1]


def _reply(completion: Completion) -> Reply:
    """`renderers` 0.1 reads the log-probabilities that vLLM sends in text mode: tokens as `token_id:N`."""
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    fields: dict[str, Any] = {
        "index": 0,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
    }
    answer: dict[str, Any] = {"choices": [{**fields, "logprobs": {"content": content}}]}
    if completion.prompt_ids is not None:
        answer |= {"prompt_token_ids": completion.prompt_ids, "mm_placeholders": completion.placeholders}
    return Reply(msgspec.json.encode(answer))

"""What happens to a rollout whose next prompt does not fit into the model's context window.

A harness that handles overflow (it compacts the conversation, or stops) gets an error in words that it recognises. If
the harness dies of that error instead, the rollout is over, but it has not failed: verifiers treats it like a rollout
that reached `max_total_tokens`, scores what was sampled, and the sampled tokens are trained.
"""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception.server import DIALECTS, InterceptionServer
from verifiers.v1.rollout import Rollout

OVERFLOW = "maximum context length"
"""Words of every such error. `is_context_overflow` of verifiers looks for them, and `renderers` uses them."""
ENGINE_OVERFLOW = "maximum model length"
"""vLLM's words where it alone knows how long the prompt is, because the prompt has images."""
STOP = "max_total_tokens"
"""Stop condition of a trace that overflowed: one of those that verifiers counts as truncated."""
TRUNCATING = {"max_input_tokens", "max_output_tokens", STOP, "compaction_failed"}
"""Stop conditions by which a bound on tokens ends a trace."""


class ContextOverflowError(ProviderError):  # type: ignore[misc]
    """A prompt leaves no room for an answer."""


def has_overflowed(trace: vf.Trace) -> bool:
    """Tell whether a trace ended because its context window was full.

    A harness that compacts the conversation goes on after an overflow, so only the last call of the model counts.
    """
    error = trace.calls[-1].error if trace.calls else None
    return error is not None and error.type == ContextOverflowError.__name__


def model_cards(model: str, max_len: int) -> dict[str, Any]:
    """Return an answer to `GET /v1/models` as vLLM gives it.

    Args:
        model: name of the model.
        max_len: length of its context window [tokens].
    """
    return {"object": "list", "data": [{"id": model, "object": "model", "max_model_len": max_len}]}


def install() -> None:
    """Have verifiers stop, and not fail, rollouts that overflow, and tell harnesses how long the context window is.

    verifiers has no place to register either of the two.
    """
    Rollout.fail = _fail
    InterceptionServer.handle_models = _handle_models


_fail_with = Rollout.fail
_relay_models = InterceptionServer.handle_models


def _fail(self: Rollout, error: Exception) -> None:
    if isinstance(error, ContextOverflowError):
        self.trace.stop(STOP)
    else:
        _fail_with(self, error)


async def _handle_models(self: InterceptionServer, request: web.Request) -> web.Response:
    """Answer from the client: the base URL of a TokenClient's config only stands for its router."""
    sessions = (self.sessions.get(dialect.secret(request.headers)) for dialect in DIALECTS)
    session = next((session for session in sessions if session is not None), None)
    endpoint = getattr(session.client, "endpoint", None) if session is not None else None
    if endpoint is None:
        relayed: web.Response = await _relay_models(self, request)
        return relayed
    return web.json_response(await endpoint.get("/models", dict))

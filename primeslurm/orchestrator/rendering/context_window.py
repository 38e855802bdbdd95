"""Handling of a rollout whose next prompt does not fit into the model's context window.

A harness that handles overflow by compacting the conversation or stopping gets an error that it recognizes. If the
harness fails with that error instead, the rollout ends but has not failed: verifiers treats it like a rollout that
reached `max_total_tokens`, scores what was sampled, and the sampled tokens are trained.
"""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception.server import DIALECTS, InterceptionServer
from verifiers.v1.rollout import Rollout

# Text of every such error. `is_context_overflow` of verifiers looks for it, and `renderers` uses it.
OVERFLOW = "maximum context length"
# vLLM's text where only vLLM knows the length of the prompt, because the prompt has images
ENGINE_OVERFLOW = "maximum model length"
STOP = "max_total_tokens"  # Stop condition of an overflowed trace. verifiers counts it as truncated.
# Stop conditions by which a limit on tokens ends a trace
TRUNCATING = {"max_input_tokens", "max_output_tokens", STOP, "compaction_failed"}


class ContextOverflowError(ProviderError):  # type: ignore[misc]
    """A prompt leaves no room for an answer."""


def has_overflowed(trace: vf.Trace) -> bool:
    """Return whether a trace ended because its context window was full."""
    # A harness that compacts the conversation continues after an overflow, so only the last call counts.
    error = trace.calls[-1].error if trace.calls else None
    return error is not None and error.type == ContextOverflowError.__name__


def model_cards(model: str, max_len: int) -> dict[str, Any]:
    """Return vLLM's answer to `GET /v1/models` for a model with a context window of `max_len` tokens."""
    return {"object": "list", "data": [{"id": model, "object": "model", "max_model_len": max_len}]}


def install() -> None:
    """Let verifiers stop rollouts that overflow instead of failing them, and tell harnesses the context length."""
    # verifiers offers no way to register either, so this patches two of its methods.
    Rollout.fail = _fail
    InterceptionServer.handle_models = _handle_models


_original_fail = Rollout.fail
_original_handle_models = InterceptionServer.handle_models


def _fail(self: Rollout, error: Exception) -> None:
    if isinstance(error, ContextOverflowError):
        self.trace.stop(STOP)
    else:
        _original_fail(self, error)


async def _handle_models(self: InterceptionServer, request: web.Request) -> web.Response:
    # The session's client answers: the base URL in its config is only a placeholder for the router.
    sessions = (self.sessions.get(dialect.secret(request.headers)) for dialect in DIALECTS)
    session = next((session for session in sessions if session is not None), None)
    endpoint = getattr(session.client, "endpoint", None) if session is not None else None
    if endpoint is None:
        response: web.Response = await _original_handle_models(self, request)
        return response
    return web.json_response(await endpoint.get("/models", dict))

"""Report which policy version computed a prompt if prefill and decode engines are separate (P/D).

vLLM's `weight_versions` cover sampled tokens, so they do not show a weight update between prefill and decode. Here the
prefill engine's answer carries its version in `kv_transfer_params`, which the router forwards. If the decode engine has
another version, its spans begin with an empty span that carries the prefill engine's version.
"""

from __future__ import annotations

import functools
from typing import Any

from primeslurm.inference.patches import expect

# Key of the version in `kv_transfer_params`.
PREFILL_VERSION = "primeslurm_prefill_version"


def with_prefill(spans: Any, version: object) -> Any:
    """Return the spans of a completion, after an empty one if the prefill engine had another `version`."""
    if not spans or not isinstance(version, str) or version == spans[0].version:
        return spans
    return [type(spans[0])(version, 0, 0), *spans]


def apply() -> None:
    """Make vLLM's engines send and report the prefill version. Raise RuntimeError if vLLM's code has changed."""
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    original = expect(ServingTokens, "serve_tokens", ("self", "request", "raw_request"))

    @functools.wraps(original)
    async def serve_tokens(self: Any, request: Any, raw_request: Any = None) -> Any:
        transfer = request.kv_transfer_params or {}
        prefills, version = transfer.get("do_remote_decode"), transfer.pop(PREFILL_VERSION, None)
        answer = await original(self, request, raw_request)
        for choice in getattr(answer, "choices", ()):  # an error has none
            if prefills and answer.kv_transfer_params and choice.weight_versions:
                answer.kv_transfer_params[PREFILL_VERSION] = choice.weight_versions[0].version
            else:
                choice.weight_versions = with_prefill(choice.weight_versions, version)
        return answer

    ServingTokens.serve_tokens = serve_tokens

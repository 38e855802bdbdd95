"""Requests of a rollout to an engine or router."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx

from primeslurm.wire.transport import secret
from tests.support.waiting import wait_until


def generate(
    url: str,
    prompt: list[int],
    max_tokens: int,
    salt: str | None = None,
    session: str | None = None,
    timeout_s: float = 300,
    transfer: dict[str, Any] | None = None,
    model: str | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """Generate tokens, and return the whole response. Raise httpx.HTTPStatusError for an error status.

    `transfer`: `kv_transfer_params`, which a router adds to the requests of a P/D pair.
    """
    body = {
        "token_ids": prompt,
        "cache_salt": salt,
        "kv_transfer_params": transfer,
        "model": model,
        "sampling_params": {
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": 0,
            "ignore_eos": True,
            **sampling,
        },
    }
    headers = secret.header() | ({"X-Session-ID": session} if session else {})
    # `verify=False` because httpx otherwise reads all certificates of the machine for every call
    where = f"{url}/inference/v1/generate"
    response = httpx.post(where, json=body, headers=headers, timeout=timeout_s, verify=False)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def generate_with_retries(url: str, prompt: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    """Generate as rollouts do, which retry after a 5xx or a lost connection.

    A router answers 5xx while an engine restarts. A decode engine does so if a busy prefill engine has not answered
    NIXL's handshake, the first exchange of the two, after 5 s.
    """

    def once() -> dict[str, Any] | None:
        with contextlib.suppress(httpx.HTTPError):
            return generate(url, prompt, max_tokens, **options)
        return None

    return wait_until(once)


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def spans(answer: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return (version, start, end) of the sampled tokens."""
    return [(int(span["version"]), span["start"], span["end"]) for span in answer["choices"][0]["weight_versions"]]


def metric(url: str, name: str) -> float:
    """Return the sum of a Prometheus counter over its labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60, verify=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

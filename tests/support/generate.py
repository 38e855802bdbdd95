"""What a rollout asks of an engine or router."""

from __future__ import annotations

from typing import Any

import httpx

from primeslurm.wire.transport import secret


def generate(
    url: str,
    prompt: list[int],
    max_tokens: int,
    salt: str | None = None,
    session: str | None = None,
    timeout_s: float = 300,
    **sampling: Any,
) -> dict[str, Any]:
    """Token-in, token-out generation: the whole answer. Raises httpx.HTTPStatusError."""
    body = {
        "token_ids": prompt,
        "cache_salt": salt,
        "sampling_params": {
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": 0,
            "ignore_eos": True,
            **sampling,
        },
    }
    headers = secret.header() | ({"X-Session-ID": session} if session else {})
    # plain HTTP: without `verify=False`, each call would first read all certificates of the machine
    where = f"{url}/inference/v1/generate"
    response = httpx.post(where, json=body, headers=headers, timeout=timeout_s, verify=False)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def tokens(answer: dict[str, Any]) -> list[int]:
    """The sampled tokens."""
    return list(answer["choices"][0]["token_ids"])


def logprobs(answer: dict[str, Any]) -> list[float]:
    """Log-probability of each sampled token."""
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def spans(answer: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(version, start, end) of the sampled tokens."""
    return [(int(span["version"]), span["start"], span["end"]) for span in answer["choices"][0]["weight_versions"]]


def metric(url: str, name: str) -> float:
    """Sum of a Prometheus counter over its labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60, verify=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

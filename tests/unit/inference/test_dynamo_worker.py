"""Generation of a Dynamo worker behind the version gate."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest

from primeslurm.inference.dynamo_worker import GateClosedError, gated
from primeslurm.inference.prefill_version import PREFILL_VERSION
from primeslurm.inference.version_gate import VersionGate
from primeslurm.wire.transport import secret
from tests.unit.inference.test_version_gate import FakeEngineApp, update


class Span(NamedTuple):
    """As vLLM's WeightVersionSpan."""

    version: str
    start: int
    end: int


SPAN = Span("3", 0, 2)
VERSIONS = [{"version": "3", "start": 0, "end": 2}]


async def sample(prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
    """Generate two outputs, of which the last one has policy versions."""
    yield SimpleNamespace(outputs=[SimpleNamespace(weight_versions=None)], kv_transfer_params=None)
    yield SimpleNamespace(outputs=[SimpleNamespace(weight_versions=[SPAN])], kv_transfer_params={"of": "nixl"})


async def last(generate: Any, salt: str, **transfer: str) -> Any:
    prompt = {"prompt_token_ids": [1], "cache_salt": f"dynamo-cache-salt:{salt}"}
    sampling = SimpleNamespace(extra_args={"kv_transfer_params": transfer} if transfer else None)
    return [output.kv_transfer_params async for output in generate(prompt, sampling, "id")][-1]


async def test_worker_generates_only_with_a_confirmed_policy_that_is_new_enough() -> None:
    gate = VersionGate(FakeEngineApp())
    generate = gated(sample, gate, prefills=False)
    with pytest.raises(GateClosedError, match="no policy version is confirmed"):
        await last(generate, "run:3")
    transport = httpx.ASGITransport(app=gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=secret.header()) as http:
        await update(http, 3)
        assert await last(generate, "run:3") == {"of": "nixl", "weight_versions": VERSIONS}
        assert await last(generate, "run:3", **{PREFILL_VERSION: "3"}) == {"of": "nixl", "weight_versions": VERSIONS}
        older = [{"version": "2", "start": 0, "end": 0}, *VERSIONS]
        assert await last(generate, "run:3", **{PREFILL_VERSION: "2"}) == {"of": "nixl", "weight_versions": older}
        assert await last(gated(sample, gate, prefills=True), "run:3") == {"of": "nixl", PREFILL_VERSION: "3"}
        with pytest.raises(GateClosedError, match="needs policy version 4"):
            await last(generate, "run:4")
        assert (await http.get("/health")).status_code == 503
    assert inspect.signature(generate) == inspect.signature(sample)

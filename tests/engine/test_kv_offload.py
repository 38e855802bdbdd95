"""KV that has left an engine comes back: from memory, from disk, for other engines, and never for another policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primeslurm.orchestrator.engines import Policy
from primeslurm.plan.commands import Command, EngineRole
from tests.engine.conftest import tiny_engine
from tests.support.generate import generate, metric, tokens
from tests.support.processes import Server, Zygote

pytestmark = pytest.mark.engine
HITS = "vllm:external_prefix_cache_hits_total"
CACHE = 768 * 2 * 2 * 32 * 4
"""Bytes of 768 tokens (keys and values of 2 layers, 1 head of 32 floats): two of the prompts below."""
PROMPTS = [[2 + (i * k) % 40 for i in range(321)] for k in (1, 3, 7, 9)]


def small_engine(model: Path, role: EngineRole = "engine", **inference: Any) -> Command:
    """An engine whose own cache cannot keep all prompts."""
    return tiny_engine(model, role, kv_cache_bytes=CACHE, vllm_extra={"max_model_len": 512}, **inference)


def answers(url: str, salt: str) -> list[list[int]]:
    """Every prompt once."""
    return [tokens(generate(url, prompt, 4, salt=salt)) for prompt in PROMPTS]


async def open_at_once(engine: Server, client: Any, model: Path) -> Server:
    engine.wait("/primeslurm/status")
    await client(engine).apply(Policy(0, str(model)), 60)
    return engine


@pytest.mark.parametrize("disk", [False, True])
async def test_native_tiers_give_back_what_the_cache_had_to_drop(
    disk: bool, zygote: Zygote, client, model: Path, tmp_path: Path
) -> None:
    tiers: dict[str, Any] = {"type": "native", "cpu": {"bytes": 2**21}}
    if disk:
        tiers |= {"cpu": {"bytes": CACHE}, "disk": {"path": str(tmp_path)}}
    engine = zygote.start(small_engine(model, kv_offload=tiers))
    try:
        await open_at_once(engine, client, model)
        first = answers(engine.url, "a")
        assert metric(engine.url, HITS) == 0
        assert answers(engine.url, "a") == first
        hits = metric(engine.url, HITS)
        assert hits >= 4 * 256
        answers(engine.url, "b")
        assert metric(engine.url, HITS) == hits  # another policy's KV is never used
        assert any(tmp_path.rglob("*.bin")) == disk
    finally:
        engine.stop()

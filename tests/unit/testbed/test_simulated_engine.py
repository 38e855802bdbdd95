"""Cached tokens of an engine with a simulated clock, from which emulated engines make their KV events."""

from __future__ import annotations

from benchmarks.support.simulated_engine import PREFILL_TOKENS_PER_S, SimulatedEngine, Turn

PROMPT, SHARED = 6000, 4000
PROMPT_S = PROMPT / PREFILL_TOKENS_PER_S


def test_cached_tokens_follow_prefill_decode_and_eviction() -> None:
    engine = SimulatedEngine(kv_tokens=8000)
    engine.add(Turn("a", "group", SHARED, PROMPT, target=100))
    engine.advance(PROMPT_S / 2)
    assert engine.cached_tokens() == {"group": PROMPT // 2, "a": 0}
    engine.advance(PROMPT_S / 2)
    assert engine.cached_tokens() == {"group": SHARED, "a": PROMPT - SHARED}
    while not engine.advance(0.1):
        pass
    assert engine.cached_tokens() == {"group": SHARED, "a": PROMPT - SHARED + 100}
    engine.add(Turn("b", "other", SHARED, PROMPT, target=1))
    engine.advance(PROMPT_S)
    cached = engine.cached_tokens()
    assert cached["other"] == SHARED and cached.get("group", 0) + cached.get("a", 0) <= 8000 - PROMPT


def test_rollouts_of_a_group_share_cached_tokens() -> None:
    engine = SimulatedEngine()
    for job in ("a", "b"):
        engine.add(Turn(job, "group", SHARED, SHARED + 100, target=1000))
        engine.advance(PROMPT_S)
    cached = engine.cached_tokens()
    assert cached["group"] == SHARED and cached["a"] >= 100 and cached["b"] >= 100
    assert engine.counts["prefix_hits"] == SHARED

"""Advice from the load of the engines."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from primeslurm.records.resolved_recipe import RunRecipe
from primeslurm.records.state import Load, ReplicaLoad
from primeslurm.run.status.advice import Advice, Tunables, advise, tunables_of

SPLIT = Tunables(prefill=3, decode=1)
BUSY_PREFILL = Load(
    engines=24, seconds=60, running_mean=24, waiting_mean=90, busy_mean=1, computed_per_s=5200, kv_usage_mean=0.5
)
CALM_DECODE = Load(engines=8, seconds=60, running_mean=200, busy_mean=1, generated_per_s=1000, kv_usage_mean=0.6)
FULL_DECODE = msgspec.structs.replace(CALM_DECODE, waiting_mean=80, kv_usage_mean=0.95)
IDLE_PREFILL = msgspec.structs.replace(BUSY_PREFILL, waiting_mean=0, running_mean=2, busy_mean=0.3)


def only(prefill: Load, decode: Load, tunables: Tunables = SPLIT) -> Advice | None:
    all_advice = advise({"prefill": prefill, "decode": decode}, tunables)
    assert len(all_advice) <= 1
    return all_advice[0] if all_advice else None


def test_saturated_prefill_grows_to_what_decode_can_use() -> None:
    advice = only(BUSY_PREFILL, CALM_DECODE)
    assert advice is not None
    assert advice.text == "prefill is saturated: 4:1 (prefill:decode) would be balanced; the run has 3:1"
    assert "3.8 requests waited per prefill engine (busy 100% of the time)" in advice.reason
    assert "5.2 prompt tokens computed per sampled one" in advice.reason
    assert advice.changes == {"deployment.inference.prefill.num_replicas": 4}


def test_advice_at_most_doubles_a_role() -> None:
    advice = only(BUSY_PREFILL, msgspec.structs.replace(CALM_DECODE, kv_usage_mean=0.02))
    assert advice is not None and advice.changes == {"deployment.inference.prefill.num_replicas": 6}


def test_saturated_decode_takes_nodes_from_idle_prefill_or_grows() -> None:
    advice = only(IDLE_PREFILL, FULL_DECODE)
    assert advice is not None and advice.changes == {"deployment.inference.prefill.num_replicas": 2}
    assert advice.text.startswith("decode is saturated: 2:1")
    advice = only(IDLE_PREFILL, FULL_DECODE, Tunables(prefill=1, decode=1))
    assert advice is not None and advice.changes == {"deployment.inference.decode.num_replicas": 2}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (msgspec.structs.replace(BUSY_PREFILL, seconds=10), CALM_DECODE),
        (msgspec.structs.replace(BUSY_PREFILL, busy_mean=0.5), CALM_DECODE),
        (msgspec.structs.replace(BUSY_PREFILL, waiting_mean=5), CALM_DECODE),
        (BUSY_PREFILL, FULL_DECODE),
        (IDLE_PREFILL, CALM_DECODE),
        (msgspec.structs.replace(BUSY_PREFILL, deferred_mean=90), CALM_DECODE),
        (IDLE_PREFILL, msgspec.structs.replace(FULL_DECODE, deferred_mean=80)),
        (BUSY_PREFILL, Load()),
    ],
    ids=["short", "half-busy", "few wait", "both full", "both calm", "waits for offload", "waits for KV", "no decode"],
)
def test_there_is_no_advice_without_saturation(prefill: Load, decode: Load) -> None:
    assert only(prefill, decode) is None


def test_preempting_engines_get_fewer_rollouts_in_flight() -> None:
    load = Load(engines=2, seconds=60, preemptions_per_s=0.1, kv_usage_mean=0.97, running_mean=40.5, waiting_mean=20)
    (advice,) = advise({"engine": load}, Tunables(max_inflight=64))
    assert advice.changes == {"orchestrator.max_inflight_rollouts": 40}
    assert "6.0 times a minute" in advice.reason
    (advice,) = advise({"engine": load}, Tunables())
    assert advice.changes == {} and "or KV offload" in advice.text
    (advice,) = advise({"engine": load}, Tunables(kv_offload=True))
    assert "offload" not in advice.text
    assert advise({"engine": msgspec.structs.replace(load, preemptions_per_s=0.001)}, Tunables()) == []


def test_tunables_are_read_from_the_recipe() -> None:
    inference = {"type": "disaggregated", "prefill": {"num_replicas": 3}, "decode": {"num_replicas": 1}}
    recipe = {"deployment": {"inference": inference}, "orchestrator": {"max_inflight_rollouts": 9, "newer": {}}}

    def tunables(recipe: dict[str, Any]) -> Tunables:
        return tunables_of(msgspec.convert(recipe, RunRecipe))

    assert tunables({**recipe, "inference": {"kv_offload": {"type": "native"}}}) == Tunables(3, 1, 9, True)
    assert tunables({"deployment": {"inference": {"type": "multi_node"}}}) == Tunables()
    assert tunables({"orchestrator": None, "inference": None, "deployment": None}) == tunables({}) == Tunables()


def test_concurrency_limit_shows_saturation_without_waiting_requests() -> None:
    full = msgspec.structs.replace(FULL_DECODE, waiting_mean=0)
    loads = {"prefill": IDLE_PREFILL, "decode": full}
    assert advise(loads, SPLIT) == []
    (advice,) = advise(
        loads, SPLIT, [ReplicaLoad(200, 200, "kv"), ReplicaLoad(200, 190, "kv"), ReplicaLoad(200, 20, "lost")]
    )
    assert advice.changes == {"deployment.inference.prefill.num_replicas": 2}
    busy = msgspec.structs.replace(IDLE_PREFILL, busy_mean=0.9)
    assert advise({"prefill": busy, "decode": full}, SPLIT, [ReplicaLoad(200, 200, "kv")]) == [], (
        "overload is no imbalance"
    )
    assert advise({"prefill": IDLE_PREFILL, "decode": CALM_DECODE}, SPLIT, [ReplicaLoad(200, 20, "demand")]) == []


def test_engines_with_unused_capacity_are_named() -> None:
    calm, tunables = msgspec.structs.replace(CALM_DECODE, kv_usage_mean=0.3), Tunables(max_inflight=64)
    (advice,) = advise({"engine": calm}, tunables, [ReplicaLoad(90, 64, "bound")])
    assert advice.changes == {"orchestrator.max_inflight_rollouts": 128}
    assert "30% of the KV cache" in advice.reason
    assert advise({"engine": calm}, tunables, [ReplicaLoad(90, 64, "demand")]) == []
    assert advise({"engine": FULL_DECODE}, tunables, [ReplicaLoad(64, 64, "bound")]) == []

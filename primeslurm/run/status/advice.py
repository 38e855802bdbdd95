"""What the load of the engines says about the recipe: pure, and silent without evidence.

Means are over the last minute. A role is saturated if requests queue up in front of it all the time; by how much the
others would have to grow follows from how much of their own capacity they use meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from primeslurm.base.units import duration
from primeslurm.records.resolved_recipe import RunRecipe
from primeslurm.records.state import Load, ReplicaLoad

MIN_SECONDS = 30.0
"""Shorter windows say nothing: a policy update alone takes seconds."""
WAITING_PER_ENGINE = 1.0
SATURATED_BUSY = 0.9
FULL_KV = 0.85
ROOM_KV = 0.65
"""Decode with less KV in use than this, and nothing waiting, could take more."""
IDLE_BUSY = 0.5
TARGET = 0.8
"""Use of a role that counts as balanced: the rest is for bursts."""
MAX_STEP = 2.0
"""No advice goes further than doubling a role: beyond that, measure again."""
PREEMPTIONS_PER_MIN = 1.0


class Advice(msgspec.Struct, frozen=True):
    """One thing to change, why, and the recipe fields that do it."""

    text: str
    reason: str
    changes: dict[str, int] = {}


@dataclass(frozen=True)
class Tunables:
    """Settings of a recipe that advice can change, or has to know."""

    prefill: int | None = None
    """Prefill replicas of one inference deployment; None: engines prefill and decode."""
    decode: int | None = None
    max_inflight: int | None = None
    """Rollouts in flight at most."""
    kv_offload: bool = False
    """KV that does not fit is kept in CPU memory or on disk."""


def tunables_of(recipe: RunRecipe) -> Tunables:
    """Take them from a recipe."""
    nodes = recipe.deployment.inference if recipe.deployment else None
    split = nodes if nodes and nodes.type == "disaggregated" else None
    return Tunables(
        prefill=split.prefill.num_replicas if split else None,
        decode=split.decode.num_replicas if split else None,
        max_inflight=recipe.orchestrator.max_inflight_rollouts if recipe.orchestrator else None,
        kv_offload=bool(recipe.inference and recipe.inference.kv_offload),
    )


def advise(roles: Mapping[str, Load], tunables: Tunables, shares: Iterable[ReplicaLoad] = ()) -> list[Advice]:
    """Tell what to change, most important first.

    Args:
        roles: load by role.
        tunables: of the recipe.
        shares: of the replicas, where rollouts in flight follow their load: then hardly any request waits, and what
            keeps them from being more says what is saturated.
    """
    found = []
    limits = Counter(share.limit for share in shares)
    limit = limits.most_common(1)[0][0] if limits else None
    known = {role: load for role, load in roles.items() if load.engines and load.seconds >= MIN_SECONDS}
    prefill, decode = known.get("prefill"), known.get("decode")
    if prefill and decode and tunables.prefill and tunables.decode:
        found.append(_balance(prefill, decode, tunables.prefill, tunables.decode, limit))
    if limit == "bound":
        found += [_room(known[role], tunables) for role in ("engine", "decode") if role in known]
    found += [_kv_pressure(role, known[role], tunables) for role in ("engine", "decode") if role in known]
    return [advice for advice in found if advice is not None]


def _room(load: Load, tunables: Tunables) -> Advice | None:
    """Engines that could do more, if they were given more."""
    if load.kv_usage_mean >= ROOM_KV or _waiting(load) >= WAITING_PER_ENGINE:
        return None
    wanted = tunables.max_inflight and {"orchestrator.max_inflight_rollouts": int(tunables.max_inflight * MAX_STEP)}
    return Advice(
        text="engines have capacity for more rollouts than orchestrator.max_inflight_rollouts allows",
        reason=f"over {duration(load.seconds)}, {load.kv_usage_mean:.0%} of the KV cache was used; few requests waited",
        changes=wanted or {},
    )


def _balance(prefill: Load, decode: Load, p: int, d: int, limit: str | None) -> Advice | None:
    prefill_full = _waiting(prefill) >= WAITING_PER_ENGINE and prefill.busy_mean >= SATURATED_BUSY
    decode_full = (_waiting(decode) >= WAITING_PER_ENGINE or limit in ("kv", "preemption")) and (
        decode.kv_usage_mean >= FULL_KV or decode.preemptions_per_s * 60 >= PREEMPTIONS_PER_MIN
    )
    if prefill_full and decode.kv_usage_mean < ROOM_KV and _waiting(decode) < WAITING_PER_ENGINE:
        return _advice("prefill", _more(p, TARGET / max(decode.kv_usage_mean, 0.01)), d, p, d, prefill, decode)
    # Requests come in bursts: some wait for a moment even at a prefill engine that has nothing to do most of the time.
    if decode_full and prefill.busy_mean < IDLE_BUSY:
        wanted = max(1, math.ceil(p * prefill.busy_mean / TARGET))
        if wanted < p:
            return _advice("decode", wanted, d, p, d, prefill, decode)
        return _advice("decode", p, _more(d, TARGET / max(prefill.busy_mean, 0.01)), p, d, prefill, decode)
    return None


def _more(now: int, factor: float) -> int:
    """So many times more, at least one more, and never more than double."""
    return max(now + 1, min(math.ceil(now * factor - 1e-9), int(now * MAX_STEP)))


def _advice(saturated: str, p: int, d: int, p_now: int, d_now: int, prefill: Load, decode: Load) -> Advice:
    changes = {"prefill": (p_now, p), "decode": (d_now, d)}
    return Advice(
        text=f"{saturated} is saturated: {p}:{d} (prefill:decode) would be balanced; the run has {p_now}:{d_now}",
        reason=(
            f"over {duration(prefill.seconds)}, {_waiting(prefill):.1f} requests waited per prefill engine (busy "
            f"{prefill.busy_mean:.0%} of the time) and {_waiting(decode):.1f} per decode engine "
            f"({decode.kv_usage_mean:.0%} of its KV in use){_token_ratio(prefill, decode)}"
        ),
        changes={
            f"deployment.inference.{role}.num_replicas": wanted
            for role, (now, wanted) in changes.items()
            if wanted != now
        },
    )


def _token_ratio(prefill: Load, decode: Load) -> str:
    if not prefill.computed_per_s or not decode.generated_per_s:
        return ""
    return f"; {prefill.computed_per_s / decode.generated_per_s:.1f} prompt tokens computed per sampled one"


def _kv_pressure(role: str, load: Load, tunables: Tunables) -> Advice | None:
    per_minute = load.preemptions_per_s * 60
    if per_minute < PREEMPTIONS_PER_MIN or load.kv_usage_mean < FULL_KV:
        return None
    fits = int(load.running_mean)
    lower = (
        {"orchestrator.max_inflight_rollouts": fits}
        if tunables.max_inflight and 0 < fits < tunables.max_inflight
        else {}
    )
    offload = "" if tunables.kv_offload else ", or KV offload (inference.kv_offload),"
    return Advice(
        text=f"{role} engines run out of KV cache: fewer rollouts in flight{offload} would help",
        reason=(
            f"over {duration(load.seconds)}, requests were preempted {per_minute:.1f} times a minute with "
            f"{load.kv_usage_mean:.0%} of the KV in use; {load.running_mean:.0f} ran and {load.waiting_mean:.0f} waited"
        ),
        changes=lower,
    )


def _waiting(load: Load) -> float:
    """Requests per engine that wait for room. Those that wait for KV from prefill say nothing about decode."""
    return max(0.0, load.waiting_mean - load.deferred_mean) / load.engines

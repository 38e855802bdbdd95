"""Advice on recipe fields from the load of the engines, averaged over the last minute.

A role is saturated if requests queue in front of it all the time. The advised size follows from the fraction of its
capacity that the other role uses meanwhile.
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

# Shortest window [s] that gives advice; a weight update alone takes seconds.
MIN_SECONDS = 30.0
WAITING_PER_ENGINE = 1.0
SATURATED_BUSY = 0.9
FULL_KV = 0.85
# Decode engines below this KV usage without waiting requests have free capacity.
ROOM_KV = 0.65
IDLE_BUSY = 0.5
# Utilisation of a balanced role; the rest absorbs bursts.
TARGET = 0.8
# Largest advised growth of a role. The model is too rough to extrapolate further.
MAX_STEP = 2.0
PREEMPTIONS_PER_MIN = 1.0


class Advice(msgspec.Struct, frozen=True):
    """A recommended change of recipe fields, with the reason."""

    text: str
    reason: str
    changes: dict[str, int] = {}


@dataclass(frozen=True)
class Tunables:
    """Recipe settings that the advice depends on."""

    prefill: int | None = None
    """Prefill replicas of one inference deployment; None if engines do both prefill and decode."""
    decode: int | None = None
    max_inflight: int | None = None  # most rollouts in flight
    kv_offload: bool = False  # True if KV blocks are offloaded to CPU memory or disk


def tunables_of(recipe: RunRecipe) -> Tunables:
    nodes = recipe.deployment.inference if recipe.deployment else None
    split = nodes if nodes and nodes.type == "disaggregated" else None
    return Tunables(
        prefill=split.prefill.num_replicas if split else None,
        decode=split.decode.num_replicas if split else None,
        max_inflight=recipe.orchestrator.max_inflight_rollouts if recipe.orchestrator else None,
        kv_offload=bool(recipe.inference and recipe.inference.kv_offload),
    )


def advise(roles: Mapping[str, Load], tunables: Tunables, shares: Iterable[ReplicaLoad] = ()) -> list[Advice]:
    """Return advice, most important first, from the load by role.

    `shares` is the state of the adaptive concurrency of each replica; empty without it.
    """
    advice = []
    # With adaptive concurrency hardly any request waits, so the limit that it hits tells which role is saturated.
    limits = Counter(share.limit for share in shares)
    limit = limits.most_common(1)[0][0] if limits else None
    measured = {role: load for role, load in roles.items() if load.engines and load.seconds >= MIN_SECONDS}
    prefill, decode = measured.get("prefill"), measured.get("decode")
    if prefill and decode and tunables.prefill and tunables.decode:
        advice.append(_balance(prefill, decode, tunables.prefill, tunables.decode, limit))
    if limit == "bound":
        advice += [_spare_capacity(measured[role], tunables) for role in ("engine", "decode") if role in measured]
    advice += [_kv_pressure(role, measured[role], tunables) for role in ("engine", "decode") if role in measured]
    return [each for each in advice if each is not None]


def _spare_capacity(load: Load, tunables: Tunables) -> Advice | None:
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
    decode_full = (_waiting(decode) >= WAITING_PER_ENGINE or limit == "kv") and (
        decode.kv_usage_mean >= FULL_KV or decode.preemptions_per_s * 60 >= PREEMPTIONS_PER_MIN
    )
    if prefill_full and decode.kv_usage_mean < ROOM_KV and _waiting(decode) < WAITING_PER_ENGINE:
        return _advice("prefill", _more(p, TARGET / max(decode.kv_usage_mean, 0.01)), d, p, d, prefill, decode)
    # Requests come in bursts, so a few wait for a moment even if the prefill engines are idle most of the time.
    if decode_full and prefill.busy_mean < IDLE_BUSY:
        wanted = max(1, math.ceil(p * prefill.busy_mean / TARGET))
        if wanted < p:
            return _advice("decode", wanted, d, p, d, prefill, decode)
        return _advice("decode", p, _more(d, TARGET / max(prefill.busy_mean, 0.01)), p, d, prefill, decode)
    return None


def _more(now: int, factor: float) -> int:
    """Scale a number of replicas: by at least one, and at most to the double."""
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
    # Deferred requests wait for KV blocks from prefill, so they do not show that decode is saturated.
    return max(0.0, load.waiting_mean - load.deferred_mean) / load.engines

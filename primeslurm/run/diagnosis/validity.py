"""Checks whether a run that has no failures also trains on useful data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from primeslurm.records.metrics import Row

# Newest steps that the checks read.
WINDOW = 10
MIN_STEPS = 3
# Largest KL between trainer and engines for the same policy. Rounding gives 1e-6 (float32) to 1e-2 (FP8).
MAX_KL = 0.1
# Largest fraction of rollouts dropped as too old.
MAX_STALE = 0.9
# Largest fraction of sampled tokens with an impossible log-probability. A correct engine returns none.
MAX_IMPOSSIBLE = 0.01
_MUST_BE_FINITE = ("trainer/loss", "trainer/grad_norm", "trainer/mismatch_kl", "reward/mean")
# Columns of metrics.jsonl that the checks read.
CHECKED = (
    *("step", *_MUST_BE_FINITE, "trainer/skipped", "trainer/tokens", "trainer/impossible_fraction"),
    *("rollouts/sampled_mean", "rollouts/dropped_stale", "groups/zero_signal"),
)


def problems(rows: Sequence[Row], dropped: int, batch_size: int, max_kl: float = MAX_KL) -> list[str]:
    """Return the reasons why a run is invalid; empty if there are none.

    `rows` are those of metrics.jsonl. `dropped` rollouts were too old, which counts if no step was trained. `max_kl` is
    the largest valid median of trainer/mismatch_kl.
    """
    recent = list(rows[-WINDOW:])
    checks = [
        _not_finite(rows),
        _everywhere(recent, "trainer/tokens", lambda tokens: tokens <= 1, "no token was trained on in"),
        _everywhere(recent, "rollouts/sampled_mean", lambda tokens: tokens == 0, "engines sampled no token in"),
        _everywhere(recent, "groups/zero_signal", lambda share: share == 1, "all rewards of each group were equal in"),
        _everywhere(
            recent,
            "trainer/impossible_fraction",
            lambda share: share > MAX_IMPOSSIBLE,
            "engines gave sampled tokens impossible log-probabilities in",
        ),
        _skipped(recent),
        _mismatch(recent, max_kl),
        _stale(recent, dropped, batch_size),
    ]
    return [problem for problem in checks if problem]


def _not_finite(rows: Sequence[Row]) -> str:
    for row in rows:
        if row.get("trainer/skipped"):
            continue  # a skipped step does not change the weights
        for name in _MUST_BE_FINITE:
            value = row.get(name)
            if isinstance(value, float) and not math.isfinite(value):
                return f"{name} is {value} in step {row.get('step')}"
    return ""


def _skipped(rows: Sequence[Row]) -> str:
    count = sum(row.get("trainer/skipped", 0) > 0 for row in rows)
    return f"the gradient was not finite in {count} of the last {len(rows)} steps" if count >= MIN_STEPS else ""


def _everywhere(rows: Sequence[Row], name: str, wrong: Callable[[float], bool], text: str) -> str:
    values = [row[name] for row in rows if name in row]
    return f"{text} the last {len(values)} steps" if len(values) >= MIN_STEPS and all(map(wrong, values)) else ""


def _mismatch(rows: Sequence[Row], max_kl: float) -> str:
    values = [abs(row["trainer/mismatch_kl"]) for row in rows if "trainer/mismatch_kl" in row]
    if not values or not median(values) > max_kl:
        return ""
    return (
        f"trainer and engines disagree about the same policy: KL {median(values):.2g} (median of {len(values)} steps), "
        f"limit {max_kl:g}"
    )


def _stale(rows: Sequence[Row], never_used: int, batch_size: int) -> str:
    dropped, used = float(never_used), 0
    if rows:
        dropped, used = sum(row.get("rollouts/dropped_stale", 0.0) for row in rows), batch_size * len(rows)
    if not dropped or dropped / (dropped + used) < MAX_STALE:
        return ""
    return f"{dropped:.0f} rollouts were dropped as too old, {used} were trained on"

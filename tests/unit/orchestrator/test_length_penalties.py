"""Length penalties, compared with the formulas of their papers in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeslurm.orchestrator.algorithms import Grpo
from primeslurm.orchestrator.batching.group_filter import apply_length_penalty
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.telemetry.batch_metrics import batch_metrics
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.recipes import recipe_data

relaxed = settings(deadline=None)
Member = tuple[int, float, int]
members = st.lists(st.tuples(st.integers(1, 60), st.floats(-1, 2, width=32), st.integers(1, 9)), min_size=1, max_size=6)


def group_of(made: list[Member]) -> RolloutGroup:
    """Return one rollout with two sequences for each (sampled tokens, reward, turns)."""
    return RolloutGroup("g", "e", 0, 0, tuple(rollout(*member) for member in made))


def rollout(tokens: int, reward: float, turns: int) -> tuple[Rollout, ...]:
    first = tokens // 2
    info = RolloutInfo("r", "g", "e", 0, reward, turns=turns)
    return tuple(sequence(info, count) for count in (first, tokens - first))


def sequence(info: RolloutInfo, tokens: int) -> Rollout:
    length = tokens + 5
    mask = np.arange(length) >= 5
    zeros = np.zeros(length, np.float32)
    return Rollout(info, zeros.astype(np.int32), mask, zeros, np.where(mask, 0, -1).astype(np.int32))


def lost(made: list[Member], penalty: dict[str, Any]) -> list[float]:
    environment = Environment(id="e", length_penalty=penalty)
    before = group_of(made)
    after = apply_length_penalty(before, environment)
    assert [trace[0].info.reward for trace in after.traces] == [reward for _, reward, _ in made]
    penalties = [{one.info.length_penalty for one in trace} for trace in after.traces]
    assert all(len(values) == 1 for values in penalties), "all sequences of a trace have the same penalty"
    amounts = [value for values in penalties for value in values]
    assert after.rewards == [reward - amount for (_, reward, _), amount in zip(made, amounts, strict=True)]
    assert RolloutGroup.from_bytes(after.to_bytes()).rewards == after.rewards, "a stored group keeps its penalty"
    return amounts


@relaxed
@given(made=members, buffer=st.integers(1, 20), factor=st.sampled_from([1.0, 0.3]))
def test_overlong_follows_dapo(made: list[Member], buffer: int, factor: float) -> None:
    longest = 30
    for (tokens, _, _), amount in zip(
        made, lost(made, {"type": "overlong", "max_tokens": longest, "buffer": buffer, "factor": factor}), strict=True
    ):
        if tokens <= longest - buffer:
            exact = 0.0
        elif tokens <= longest:
            exact = ((longest - buffer) - tokens) / buffer
        else:
            exact = -1.0
        assert amount == pytest.approx(-factor * exact)


@relaxed
@given(made=members)
def test_relative_follows_kimi(made: list[Member]) -> None:
    lengths = [tokens for tokens, _, _ in made]
    shortest, longest = min(lengths), max(lengths)
    for (tokens, reward, _), amount in zip(made, lost(made, {"type": "relative", "factor": 0.2}), strict=True):
        share = 0.5 - (tokens - shortest) / (longest - shortest) if longest > shortest else 0.0
        assert -amount == pytest.approx(0.2 * (share if reward >= 0.5 else min(0.0, share)))


@relaxed
@given(made=members)
def test_cost_grows_with_the_solve_rate(made: list[Member]) -> None:
    rate = np.clip(np.mean([np.float64(reward) for _, reward, _ in made]), 0, 1)
    longest, most = (max(member[i] for member in made) for i in (0, 2))
    for (tokens, _, turns), amount in zip(made, lost(made, {"type": "cost", "tokens": 0.4, "turns": 0.2}), strict=True):
        assert amount == pytest.approx(rate * (0.4 * tokens / longest + 0.2 * turns / most))


def test_advantages_use_net_rewards_and_metrics_given_ones() -> None:
    environment = Environment.model_validate({"id": "e", "length_penalty": {"type": "relative", "factor": 1.0}})
    group = group_of([(10, 1.0, 1), (30, 1.0, 1)])
    assert not group.has_signal
    after = apply_length_penalty(group, environment)
    assert after.has_signal, "a group that solves the task still differs in length"
    (credits,) = Grpo().assign([after])
    assert [float(credit.advantages[0]) for credit in credits] == [0.5, 0.5, -0.5, -0.5]
    metrics = batch_metrics([after], 1, 64)
    assert metrics["reward/mean"] == 1.0 and metrics["e/reward"] == 1.0
    assert after.given_rewards == [1.0, 1.0], "the given reward is unchanged"
    assert metrics["length_penalty/mean"] == 0.0 and metrics["length_penalty/fraction"] == 0.5
    assert apply_length_penalty(group, Environment(id="e")) is group


@pytest.mark.parametrize(
    ("orchestrator", "penalty", "field"),
    [
        ({"advantages": "max_rl"}, {"type": "relative"}, "environments.0.length_penalty"),
        ({}, {"type": "overlong", "max_tokens": 8, "buffer": 9}, "environments.0.length_penalty.buffer"),
    ],
)
def test_contradictory_penalties_are_refused(orchestrator: dict[str, Any], penalty: dict[str, Any], field: str) -> None:
    sizes = {"batch_size": 8, "group_size": 4}
    data = recipe_data(
        orchestrator=sizes | orchestrator, environments=[{"id": "reverse-text", "length_penalty": penalty}]
    )
    assert [violation.field for violation in violations(Recipe.model_validate(data))] == [field]

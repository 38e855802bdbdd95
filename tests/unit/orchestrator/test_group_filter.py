"""Filters of rollouts and groups, and their counts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeslurm.orchestrator.algorithms import Algorithm, Grpo, from_recipe
from primeslurm.orchestrator.batching.batches import documents
from primeslurm.orchestrator.batching.group_filter import GroupFilter, has_advantage, rollout_filters, sift
from primeslurm.orchestrator.dispatch.curricula import OUTCOMES, Curricula
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.orchestrator import Orchestrator
from primeslurm.records.journal import Journal
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.recipes import recipe_data

LABEL = "reverse-text"


def rollout(
    reward: float = 1.0,
    logprobs: Sequence[float] = (-1.0, -1.0, -1.0),
    tokens: Sequence[int] | None = None,
    mask: Sequence[bool] | None = None,
    finish: str = "stop",
    label: str = LABEL,
) -> Rollout:
    length = len(logprobs)
    return Rollout(
        RolloutInfo("r", "g", label, 0, reward, finish_reason=finish),
        np.array(tokens or [1] * length, np.int32),
        np.array(mask or [False, *[True] * (length - 1)]),
        np.array(logprobs, np.float32),
        np.zeros(length, np.int32),
        observed=np.zeros(length, np.bool_),
    )


def group(*rollouts: Rollout | tuple[Rollout, ...], name: str = f"{LABEL}-00000000") -> RolloutGroup:
    whole = tuple(one if isinstance(one, tuple) else (one,) for one in rollouts)
    return RolloutGroup(name, whole[0][0].info.environment, 0, 0, whole)


def applies(filters: dict[str, Any], *rollouts: Rollout | tuple[Rollout, ...], model: str = "/none") -> list[bool]:
    """Return whether a filter applies to each rollout."""
    options = Orchestrator.model_validate({"filters": [filters]})
    (one,) = rollout_filters(options.filters, model)
    return [one.applies(each if isinstance(each, tuple) else (each,)) for each in rollouts]


def test_truncated_applies_to_finish_reason_length() -> None:
    assert applies({"type": "truncated"}, rollout(finish="length"), rollout()) == [True, False]


def test_length_counts_sampled_tokens_of_all_sequences() -> None:
    long = (rollout(logprobs=[-1.0] * 6), rollout(logprobs=[-1.0] * 4))
    options = {"type": "length", "min_tokens": 3, "max_tokens": 7}
    assert applies(options, rollout(), rollout(logprobs=[-1.0] * 4), long, rollout(logprobs=[-1.0] * 8)) == [
        *(True, False, True, False)
    ]


@settings(deadline=None)
@given(
    sure=st.lists(st.booleans(), min_size=1, max_size=60),
    mask=st.lists(st.booleans(), min_size=60, max_size=60),
    run=st.integers(1, 8),
)
def test_repetition_is_a_long_run_of_likely_tokens(sure: list[bool], mask: list[bool], run: int) -> None:
    longest = here = 0
    for each, sampled in zip(sure, mask, strict=False):
        if sampled:
            here = here + 1 if each else 0
            longest = max(longest, here)
    made = rollout(logprobs=[math.log(0.995) if each else math.log(0.98) for each in sure], mask=mask[: len(sure)])
    assert applies({"type": "repetition", "run": run, "probability": 0.99}, made) == [longest >= run]


def test_gibberish_is_an_unlikely_rare_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 1000}}))
    options = {"type": "gibberish", "token_id": 500, "offset": 2.0}
    low, high = -math.log(1000) - 2.1, -math.log(1000) - 1.9
    tried = [
        rollout(tokens=[1, 501, 1], logprobs=[0, low, 0]),
        rollout(tokens=[1, 500, 1], logprobs=[0, low, 0]),
        rollout(tokens=[1, 501, 1], logprobs=[0, high, 0]),
        rollout(tokens=[501, 1, 1], logprobs=[low, 0, 0]),
    ]
    assert applies(options, *tried, model=str(tmp_path)) == [True, False, False, False]
    assert applies({**options, "vocabulary": 10_000}, *tried) == [False] * 4
    assert applies(options, *tried) == [True, False, True, False], "the token id stands in for the size"


def test_actions_mask_or_drop_a_rollout() -> None:
    """drop: the mean is of the other rollouts. mask: the mean is of all. monitor: no effect."""
    rewards, long = [0.0, 1.0, 1.0], rollout(4.0, finish="length")
    made = group(*(rollout(reward) for reward in rewards), long)
    results = {}
    for action in ("drop", "mask", "monitor"):
        options = Orchestrator.model_validate({"filters": [{"type": "truncated", "action": action}]})
        rest, counts, _ = sift(made, rollout_filters(options.filters, "/none"))
        assert counts == Counter(truncated=1) and rest is not None
        docs = documents([rest], 128, 0, Grpo())
        results[action] = [(round(float(doc.advantages[1]), 4), int(doc.mask.sum())) for doc in docs]
    assert results["drop"] == [(-0.6667, 2), (0.3333, 2), (0.3333, 2)]
    assert results["mask"] == [(-1.5, 2), (-0.5, 2), (-0.5, 2), (2.5, 0)]
    assert results["monitor"] == [(-1.5, 2), (-0.5, 2), (-0.5, 2), (2.5, 2)]


def test_drop_takes_precedence_over_mask() -> None:
    filters = [{"type": "truncated"}, {"type": "length", "max_tokens": 2}]
    options = Orchestrator.model_validate({"filters": filters})
    made = group(rollout(), rollout(finish="length", logprobs=[-1.0] * 9), rollout(finish="length"))
    rest, counts, _ = sift(made, rollout_filters(options.filters, "/none"))
    assert counts == Counter(truncated=2, length=1)
    assert rest is not None and [int(one.mask.sum()) for one in rest.sequences] == [2, 0]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1e6])
@pytest.mark.parametrize("rule", ["grpo", "max_rl"])
def test_equal_rewards_have_no_advantage_despite_rounding(reward: float, rule: str) -> None:
    algorithm = from_recipe(Recipe.model_validate(recipe_data(orchestrator={"advantages": rule})))
    for size in (2, 3, 10, 16):
        assert not has_advantage(group(*[rollout(reward)] * size), algorithm, 128)
    assert has_advantage(group(*[rollout(reward)] * 7, rollout(reward + 0.01 + abs(reward) / 1e3)), Grpo(), 128)


def group_filter(tmp_path: Path, algorithm: Algorithm | None = None, **changes: Any) -> GroupFilter:
    recipe = Recipe.model_validate(recipe_data(**changes))
    curricula = Curricula(recipe, tmp_path / OUTCOMES)
    return GroupFilter(recipe, algorithm or from_recipe(recipe), curricula, Journal(tmp_path, "orchestrator"))


def decided(made: GroupFilter, group: RolloutGroup) -> RolloutGroup | str:
    """Return what is trained of a group, or why it is rejected."""
    verdict = made.judge(group)
    return made.note(group, verdict) or verdict.rejected


def test_every_group_is_counted(tmp_path: Path) -> None:
    filters = [{"type": "zero_advantage"}, {"type": "truncated", "action": "drop"}]
    made = group_filter(tmp_path, orchestrator={"filters": filters})
    good = group(rollout(1.0), rollout(0.0))
    assert decided(made, good) == good
    assert decided(made, group(rollout(1.0), rollout(1.0))) == "zero_advantage"
    assert decided(made, group(rollout(1.0, finish="length"), rollout(0.0, finish="length"))) == "filtered"
    assert decided(made, group(rollout(1.0, finish="length"), rollout(1.0), rollout(1.0))) == "zero_advantage"
    assert made.counts == {"filtered_truncated": 3, "filtered_zero_advantage": 2}
    row = made.take_metrics()
    assert row == {
        f"env/{LABEL}/reward": pytest.approx(7 / 9),
        f"env/{LABEL}/solve_rate": pytest.approx(7 / 9),
        f"env/{LABEL}/groups": 4.0,
        f"env/{LABEL}/groups_rejected": 3.0,
        f"env/{LABEL}/filters/truncated": 3.0,
        f"env/{LABEL}/filters/zero_advantage": 2.0,
    }
    assert made.take_metrics()[f"env/{LABEL}/groups"] == 0.0, "a row counts since the previous row"


def test_environment_has_its_own_filters(tmp_path: Path) -> None:
    environments = [
        {"id": "reverse-text", "name": "a", "filters": []},
        {"id": "reverse-text", "name": "b"},
        {"id": "reverse-text", "name": "measured", "weight": 0},
    ]
    made = group_filter(tmp_path, environments=environments, orchestrator={"filters": [{"type": "zero_advantage"}]})
    equal = {label: group(rollout(label=label), rollout(label=label)) for label in ("a", "b", "measured")}
    assert decided(made, equal["a"]) == equal["a"] and decided(made, equal["b"]) == "zero_advantage"
    assert decided(made, equal["measured"]) == equal["measured"], "an environment of weight 0 has no advantages"


def test_event_reports_that_no_rollout_is_trained(tmp_path: Path) -> None:
    made = group_filter(tmp_path, orchestrator={"batch_size": 4, "filters": [{"type": "zero_advantage"}]})
    for _ in range(17):
        decided(made, group(*[rollout()] * 4))
    path = tmp_path / "events" / "orchestrator.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(event["kind"], event["rollouts"]) for event in events] == [("nothing_kept", 16 * n) for n in (1, 2, 3, 4)]
    assert events[-1]["reasons"] == {"zero_advantage": 16}
    decided(made, group(rollout(0.0), rollout()))
    decided(made, group(*[rollout()] * 4))
    assert len(path.read_text().splitlines()) == 4, "a trained group resets the count"

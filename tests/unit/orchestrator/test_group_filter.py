"""Filters of rollouts and groups, length penalties against their papers' formulas, and the stage that applies them."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.base import durable, files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.orchestrator.algorithms import Algorithm, Grpo, from_recipe
from primeslurm.orchestrator.batching.batches import documents
from primeslurm.orchestrator.batching.group_filter import (
    GroupFilter,
    apply_length_penalty,
    has_advantage,
    rollout_filters,
    sift,
)
from primeslurm.orchestrator.dispatch.curricula import OUTCOMES, Curricula
from primeslurm.orchestrator.pipeline.finalize import CompleteGroup, FinalizedGroup, GroupFinalizer
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.orchestrator.telemetry.batch_metrics import batch_metrics
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from primeslurm.recipe.sections.monitor import KeptRollouts
from primeslurm.recipe.sections.orchestrator import Environment, Orchestrator
from primeslurm.records.journal import Journal
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.recipes import recipe_data
from tests.support.waiting import wait_until_async

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


Member = tuple[int, float, int]
members = st.lists(st.tuples(st.integers(1, 60), st.floats(-1, 2, width=32), st.integers(1, 9)), min_size=1, max_size=6)


def group_of(made: list[Member]) -> RolloutGroup:
    """Return one rollout with two sequences for each (sampled tokens, reward, turns)."""
    rollouts = []
    for tokens, reward, turns in made:
        info = RolloutInfo("r", "g", "e", 0, reward, turns=turns)
        first = tokens // 2
        rollouts.append(tuple(sequence(info, count) for count in (first, tokens - first)))
    return RolloutGroup("g", "e", 0, 0, tuple(rollouts))


def sequence(info: RolloutInfo, tokens: int) -> Rollout:
    mask = np.arange(tokens + 5) >= 5
    zeros = np.zeros(len(mask), np.float32)
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


@given(made=members)
def test_relative_follows_kimi(made: list[Member]) -> None:
    lengths = [tokens for tokens, _, _ in made]
    shortest, longest = min(lengths), max(lengths)
    for (tokens, reward, _), amount in zip(made, lost(made, {"type": "relative", "factor": 0.2}), strict=True):
        share = 0.5 - (tokens - shortest) / (longest - shortest) if longest > shortest else 0.0
        assert -amount == pytest.approx(0.2 * (share if reward >= 0.5 else min(0.0, share)))


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


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "rollouts")


@pytest.fixture
def finalizer(tmp_path: Path, spool: Spool) -> Iterator[GroupFinalizer]:
    made = finalizer_of(tmp_path, spool)
    yield made
    made.close()


def finalizer_of(tmp_path: Path, spool: Spool, algorithm: Algorithm | None = None) -> GroupFinalizer:
    filters = group_filter(tmp_path, algorithm, orchestrator={"filters": [{"type": "zero_advantage"}]})
    recorder = RolloutRecorder(tmp_path, 1, KeptRollouts(), lambda: 1)
    return GroupFinalizer(filters, spool, recorder, retry_s=0.01)


def good(name: str) -> CompleteGroup:
    return CompleteGroup(group(rollout(1.0), rollout(0.0), name=name))


def is_on_disk(tmp_path: Path, name: str) -> bool:
    return (tmp_path / "rollouts" / f"{name}.group").exists()


async def finalize(finalizer: GroupFinalizer, *complete: CompleteGroup) -> list[FinalizedGroup]:
    return [finalized async for finalized in finalizer.finalize(complete)]


async def test_finalized_groups_are_on_disk_or_rejected(tmp_path: Path, finalizer: GroupFinalizer) -> None:
    dull = group(rollout(1.0), rollout(1.0), name="b")
    complete = [good("a"), CompleteGroup(dull), good("c"), CompleteGroup(dull, is_scored=True)]
    assert await finalize(finalizer, *complete) == [
        FinalizedGroup(complete[0].group),
        FinalizedGroup(dull, rejected="zero_advantage"),
        FinalizedGroup(complete[2].group),
        FinalizedGroup(dull, is_scored=True),  # a scored group is not filtered again
    ]
    assert all(is_on_disk(tmp_path, name) for name in "abc")


async def test_fault_of_one_file_does_not_hold_back_groups_written_with_it(
    tmp_path: Path, spool: Spool, finalizer: GroupFinalizer
) -> None:
    (tmp_path / "rollouts" / "b.group").mkdir()  # cannot be replaced by a file
    groups = [good(name) for name in "abc"]
    assert await finalize(finalizer, *groups) == [FinalizedGroup(each.group) for each in groups]
    assert is_on_disk(tmp_path, "a") and is_on_disk(tmp_path, "c") and not spool.waiting


async def test_event_loop_continues_during_filters_and_writes(
    tmp_path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filter and disk block until the event loop has had a thousand turns."""
    turns, put = threading.Event(), Spool.put

    class Slow(Grpo):
        def rejects(self, group: RolloutGroup) -> str | None:
            assert turns.wait(60)
            return None

    async def turn() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
        turns.set()

    monkeypatch.setattr(Spool, "put", lambda spool, group: turns.wait(60) and put(spool, group))
    finalizer = finalizer_of(tmp_path, spool, Slow())
    await asyncio.gather(finalize(finalizer, good("a")), turn())
    assert is_on_disk(tmp_path, "a")
    finalizer.close()


async def test_full_disk_holds_groups_back(tmp_path: Path, spool: Spool, finalizer: GroupFinalizer) -> None:
    assert durable.fill_reserve(tmp_path) and files.release_reserve(tmp_path)
    finalizing = asyncio.create_task(finalize(finalizer, good("a")))
    await wait_until_async(lambda: spool.waiting)
    assert not finalizing.done()
    assert durable.fill_reserve(tmp_path)
    await finalizing
    assert is_on_disk(tmp_path, "a") and not spool.waiting


async def test_group_is_deleted_after_its_write(
    tmp_path: Path, finalizer: GroupFinalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_write = threading.Event(), threading.Event()

    def put(spool: Spool, group: RolloutGroup, original: Any = Spool.put) -> bool:
        writing.set()
        assert may_write.wait(60)
        return bool(original(spool, group))

    monkeypatch.setattr(Spool, "put", put)
    finalizing = asyncio.create_task(finalize(finalizer, good("a")))
    await asyncio.to_thread(writing.wait, 60)
    deleting = asyncio.create_task(finalizer.delete(["a", "unknown"]))
    await asyncio.sleep(0)
    may_write.set()
    await asyncio.gather(deleting, finalizing)
    assert not is_on_disk(tmp_path, "a")


async def test_error_of_an_algorithm_is_raised(tmp_path: Path, spool: Spool) -> None:
    class Wrong(Grpo):
        def rejects(self, group: RolloutGroup) -> str | None:
            raise UsageError([Violation("orchestrator.algorithm", "", "it is wrong")])

    finalizer = finalizer_of(tmp_path, spool, Wrong())
    with pytest.raises(UsageError, match="it is wrong"):
        await finalize(finalizer, good("a"))
    assert not is_on_disk(tmp_path, "a")
    finalizer.close()

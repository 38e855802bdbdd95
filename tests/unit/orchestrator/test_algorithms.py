"""Algorithms against their formulas in float64, and the validation of a user's own algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator.algorithms import (
    Algorithm,
    Credit,
    Echo,
    Grpo,
    MaxRl,
    Opd,
    RolloutGroup,
    from_recipe,
    per_rollout,
)
from primeslurm.orchestrator.batching.batches import documents
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.recipes import recipe_data


@st.composite
def groups(draw: st.DrawFn, min_reward: float = -10) -> list[RolloutGroup]:
    """A batch of groups of up to five rollouts, with teacher log-probs and observed tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = []
    for number in range(draw(st.integers(1, 4))):
        rewards = draw(st.lists(st.floats(min_reward, 10, width=32), min_size=1, max_size=5))
        branches = [draw(st.integers(1, 3)) for _ in rewards]
        rollouts = tuple(
            tuple(sequence(rng, f"g{number}/{i}", reward) for _ in range(count))
            for i, (reward, count) in enumerate(zip(rewards, branches, strict=True))
        )
        made.append(RolloutGroup(f"g{number}", "e", number, 0, rollouts))
    return made


def sequence(rng: np.random.Generator, name: str, reward: float) -> Rollout:
    length = int(rng.integers(1, 20))
    mask = (rng.random(length) < 0.5) & (np.arange(length) > 0)
    logprobs, ref = (np.where(mask, -5 * rng.random(length), 0).astype(np.float32) for _ in range(2))
    return Rollout(
        RolloutInfo(name, "g", "e", 0, reward),
        rng.integers(0, 9, length).astype(np.int32),
        mask,
        logprobs,
        np.where(mask, 0, -1).astype(np.int32),
        observed=~mask & (rng.random(length) < 0.5) & (np.arange(length) > 0),
        ref_logprobs=ref,
    )


def pairs(batch: Sequence[RolloutGroup], algorithm: Algorithm) -> list[tuple[RolloutGroup, Rollout, Credit]]:
    """Return each sequence with its group and credit. `assign` must be pure, and its arrays must be valid."""
    before = [group.to_bytes() for group in batch]
    credits, again = algorithm.assign(batch), algorithm.assign(batch)
    assert [group.to_bytes() for group in batch] == before
    triples = [
        (group, one, credit)
        for group, mine in zip(batch, credits, strict=True)
        for one, credit in zip(group.sequences, mine, strict=True)
    ]
    for (_, one, credit), second in zip(triples, [credit for mine in again for credit in mine], strict=True):
        assert credit.advantages.dtype == np.float32 and credit.mask.dtype == np.bool_
        assert len(credit.advantages) == len(credit.mask) == len(one.token_ids)
        assert (credit.mask == one.mask).all() and (credit.advantages == second.advantages).all()
    return triples


def close(actual: np.ndarray, exact: np.ndarray | float) -> bool:
    return np.allclose(actual.astype(np.float64), exact, rtol=1e-5, atol=1e-5)


@given(batch=groups(), reward=st.sampled_from([0.0, 0.37]))
def test_opd_adds_the_log_ratio_to_a_fraction_of_the_reward(batch: list[RolloutGroup], reward: float) -> None:
    for group, one, credit in pairs(batch, Opd(reward)):
        assert one.ref_logprobs is not None
        gap = one.ref_logprobs.astype(np.float64) - one.logprobs.astype(np.float64)
        centred = np.float64(one.info.reward) - np.mean(np.array(group.rewards, np.float64))
        assert close(credit.advantages, np.where(one.mask, gap, 0) + reward * centred)


@given(batch=groups(), weight=st.sampled_from([0.1, 2.5]), inner=st.sampled_from([Grpo(), Opd(0.5)]))
def test_echo_adds_the_mean_cross_entropy_of_observed_tokens(
    batch: list[RolloutGroup], weight: float, inner: Algorithm
) -> None:
    triples = pairs(batch, Echo(inner, weight))
    plain = [credit for mine in inner.assign(batch) for credit in mine]
    assert all((one.advantages == two.advantages).all() for (_, _, one), two in zip(triples, plain, strict=True))
    trained = sum(int(credit.mask.sum()) for credit in plain)
    observed = sum(int(one.observed.sum()) for _, one, _ in triples if one.observed is not None)
    for _, one, credit in triples:
        assert credit.cross_entropy is not None and credit.cross_entropy.dtype == np.float32
        factor = weight * max(trained, 1) / max(observed, 1)
        assert close(credit.cross_entropy, np.where(one.observed, factor, 0))
    if trained and observed:
        total = sum(float(credit.cross_entropy.sum()) for _, _, credit in triples if credit.cross_entropy is not None)
        assert total / trained == pytest.approx(weight, rel=1e-4), "the trainer divides by the number of trained tokens"


def test_distillation_needs_the_scores_of_the_teacher() -> None:
    group = one_group()
    with pytest.raises(ValueError, match=r"r0 has no log-probabilities of the teacher"):
        Opd().assign([replace(group, rollouts=((replace(group.sequences[0], ref_logprobs=None),),))])


def test_wrapper_needs_what_its_inner_algorithm_needs() -> None:
    assert not any([Grpo().needs_teacher, Grpo().needs_observed, MaxRl().needs_teacher, Opd().needs_observed])
    assert Opd().needs_teacher and Echo(Opd(), 0.1).needs_teacher and not Echo(Grpo(), 0.1).needs_teacher
    assert Echo(Grpo(), 0.1).needs_observed


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Grpo()),
        ({"advantages": "max_rl"}, MaxRl()),
        ({"advantages": "opd", "opd_reward": 0.5}, Opd(0.5)),
        ({"advantages": "max_rl", "echo": 0.1}, Echo(MaxRl(), 0.1)),
    ],
)
def test_recipe_selects_the_algorithm(options: dict[str, Any], expected: Algorithm) -> None:
    assert from_recipe(Recipe.model_validate(recipe_data(orchestrator=options))) == expected


@dataclass(frozen=True)
class FirstTokens(Algorithm):
    """Trains the first sampled tokens of each sequence, and the others with cross-entropy. Rejects odd examples."""

    tokens: int = 1
    needs_observed = True

    def rejects(self, group: RolloutGroup) -> str | None:
        return "odd" if group.example % 2 else None

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        return [[self._one(one) for one in group.sequences] for group in groups]

    def _one(self, one: Rollout) -> Credit:
        mask = one.mask & (np.cumsum(one.mask) <= self.tokens)
        others = (one.mask & ~mask).astype(np.float32)
        return Credit(np.full(len(mask), one.info.reward, np.float32), mask, others)


class Returns(Algorithm):
    """Returns what a test has set."""

    needs_teacher = True
    answer: Callable[[RolloutGroup], Any] = staticmethod(lambda group: None)
    reason: Any = None

    def rejects(self, group: RolloutGroup) -> str | None:
        return self.reason  # type: ignore[no-any-return]

    def assign(self, groups: Sequence[RolloutGroup]) -> Any:
        return self.answer(groups[0])


class ReturnsNone(Algorithm):
    def assign(self, groups: Sequence[RolloutGroup]) -> Any:
        return None


class Unfinished(Algorithm):
    """Has no `assign`."""


def not_one(**kwargs: object) -> dict[str, object]:
    return kwargs


def load_own(name: str, echo: float | None = None, teacher: bool = True, **kwargs: Any) -> Algorithm:
    chosen = {"type": "custom", "function": f"{__name__}:{name}", "kwargs": kwargs}
    changes: dict[str, Any] = {"orchestrator": {"algorithm": chosen, "echo": echo}}
    if teacher:
        changes["teacher"] = {"type": "engines", "path": "/models/teacher"}
    return from_recipe(Recipe.model_validate(recipe_data(**changes)))


def one_group(rewards: Sequence[float] = (1.0, 0.0)) -> RolloutGroup:
    rng = np.random.default_rng(3)
    made = [replace(sequence(rng, f"r{i}", reward), observed=None) for i, reward in enumerate(rewards)]
    whole = [
        replace(one, mask=np.arange(len(one.mask)) > 0, observed=np.zeros(len(one.mask), np.bool_)) for one in made
    ]
    return RolloutGroup("g", "e", 0, 0, tuple((one,) for one in whole))


def test_own_algorithm_chooses_trained_tokens() -> None:
    algorithm, group = load_own("FirstTokens", tokens=2), one_group()
    assert algorithm.needs_observed and not algorithm.needs_teacher
    assert algorithm.rejects(group) is None and algorithm.rejects(replace(group, example=3)) == "odd"
    for doc, reward in zip(documents([group], 8, 0, algorithm), [1.0, 0.0], strict=True):
        assert len(doc) <= 8 and doc.cross_entropy is not None
        assert doc.mask.tolist() == [0 < i < 3 for i in range(len(doc))]
        assert doc.cross_entropy.tolist() == [float(i >= 3) for i in range(len(doc))]
        assert set(doc.advantages.tolist()) == {reward}


def test_echo_adds_to_an_own_algorithm() -> None:
    group = one_group()
    marked = [replace(one, mask=one.mask & (np.arange(len(one.mask)) != 2)) for one in group.sequences]
    marked = [replace(one, observed=np.arange(len(one.mask)) == 2) for one in marked]
    group = replace(group, rollouts=tuple((one,) for one in marked))
    credits = load_own("FirstTokens", echo=0.5, tokens=1).assign([group])[0]
    for credit, one in zip(credits, marked, strict=True):
        expected = [0.0 if i < 2 else (0.5 * 2 / 2 if i == 2 else 1.0) for i in range(len(one.mask))]
        assert credit.cross_entropy is not None and credit.cross_entropy.tolist() == expected


@pytest.mark.parametrize(
    ("name", "kwargs", "why"),
    [
        (
            "NoSuch",
            {},
            "cannot be imported: module 'tests.unit.orchestrator.test_algorithms' has no attribute 'NoSuch'",
        ),
        ("FirstTokens", {"toknes": 1}, r"cannot be called with its kwargs: TypeError: .*toknes"),
        ("Unfinished", {}, r"cannot be called with its kwargs: TypeError: .*abstract.*assign"),
        ("not_one", {"a": 1}, r"returns a dict, which is not an Algorithm \(derive it from"),
        ("__name__", {}, "'str' object is not callable"),
    ],
)
def test_function_that_is_not_an_algorithm_is_refused(name: str, kwargs: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=rf"^orchestrator.algorithm.function = {__name__}:{name}: .*{why}"):
        load_own(name, **kwargs)
    missing = {"algorithm": {"function": "no_such_package.algorithms:A"}}
    with pytest.raises(UsageError, match=r"no_such_package.algorithms:A: cannot be imported: No module named"):
        from_recipe(Recipe.model_validate(recipe_data(orchestrator=missing)))


def test_own_algorithm_may_require_a_teacher() -> None:
    with pytest.raises(UsageError, match=r"Returns: needs a teacher \(add `teacher: "):
        load_own("Returns", teacher=False)
    assert load_own("Returns").needs_teacher
    teacher = {"type": "engines", "path": "/models/teacher"}
    with_teacher = recipe_data(orchestrator={"algorithm": {"function": "a.b:C"}}, teacher=teacher)
    assert violations(Recipe.model_validate(with_teacher)) == [], "only the import shows whether it needs a teacher"


def credits_of(group: RolloutGroup, **changes: Any) -> list[list[Credit]]:
    """Valid credits, except for some fields of the second sequence."""
    first, second = per_rollout(group, [0.5, -0.5])
    return [[first, replace(second, **changes)]]


def arrays(group: RolloutGroup, **values: Any) -> list[list[Credit]]:
    """As `credits_of`, with functions of the second sequence's length."""
    length = len(group.sequences[1].token_ids)
    return credits_of(group, **{name: value(length) for name, value in values.items()})


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda group: None, "assign returned a NoneType"),
        (lambda group: [], "assign returned 0 lists for 1 groups"),
        (lambda group: per_rollout(group, [0, 0]), "assign returned 2 lists for 1 groups"),
        (lambda group: [Credit.even(group.sequences[0], 0)], "assign returned a Credit for a group"),
        (lambda group: [per_rollout(group, [0, 0])[:1]], "assign returned 1 credits for the 2 sequences of group g"),
        (lambda group: [[0.5, -0.5]], "a float, not a Credit"),
        (lambda group: arrays(group, advantages=lambda n: [0.0] * n), "r1 advantages as a list, not an array"),
        (lambda group: arrays(group, advantages=np.zeros), "r1 advantages as float64, not float32"),
        (lambda group: credits_of(group, advantages=np.zeros(3, np.float32)), r"r1 advantages of shape \[3\], not"),
        (lambda group: arrays(group, advantages=lambda n: np.full(n, np.nan, np.float32)), "r1 advantages with nan"),
        (lambda group: arrays(group, advantages=lambda n: np.full(n, np.inf, np.float32)), "r1 advantages with inf"),
        (lambda group: arrays(group, mask=lambda n: np.ones(n, np.int32)), "r1 mask as int32, not bool"),
        (lambda group: arrays(group, mask=lambda n: np.ones(n, np.bool_)), "r1 a mask that is true for tokens that w"),
        (lambda group: arrays(group, cross_entropy=np.ones), "r1 cross_entropy as float64, not float32"),
        (lambda group: arrays(group, cross_entropy=lambda n: -np.ones(n, np.float32)), "r1 a cross_entropy below 0"),
        (lambda group: arrays(group, cross_entropy=lambda n: np.ones(n, np.float32)), "r1 tokens with both mask and c"),
        (lambda group: 1 / 0, "assign raised ZeroDivisionError: division by zero"),
    ],
)
def test_invalid_credit_is_one_error_that_names_the_algorithm(
    answer: Callable[[RolloutGroup], Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, group = load_own("Returns"), one_group()
    monkeypatch.setattr(Returns, "answer", staticmethod(lambda group: [per_rollout(group, [0.5, -0.5])]))
    assert len(documents([group], 8, 0, algorithm)) == 2
    monkeypatch.setattr(Returns, "answer", staticmethod(answer))
    with pytest.raises(UsageError, match=rf"^orchestrator.algorithm.function = {__name__}:Returns: .*{why}") as caught:
        documents([group], 8, 0, algorithm)
    assert len(caught.value.violations) == 1


@pytest.mark.parametrize("reason", [True, "Too long", "", 3])
def test_reason_must_be_a_word(reason: object, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = load_own("Returns")
    monkeypatch.setattr(Returns, "reason", "too_long")
    assert algorithm.rejects(one_group()) == "too_long"
    monkeypatch.setattr(Returns, "reason", reason)
    with pytest.raises(UsageError, match=rf"Returns: rejects\(group g\) returned {reason!r} \(return None, or"):
        algorithm.rejects(one_group())


@given(batch=groups(min_reward=0.125), weight=st.sampled_from([0.25, 1.0, 3.0]))
def test_each_environment_has_its_own_algorithm_and_weight(batch: list[RolloutGroup], weight: float) -> None:
    # Each algorithm sees only the groups of its environment. The weight scales advantages and cross-entropy.
    environments = [
        {"id": "reverse-text", "name": "a", "advantages": "max_rl"},
        {"id": "reverse-text", "name": "b", "weight": weight},
        {"id": "reverse-text", "name": "measured", "weight": 0},
    ]
    made = from_recipe(Recipe.model_validate(recipe_data(environments=environments, orchestrator={"echo": 0.1})))
    labels = [("a", "b", "measured")[number % 3] for number in range(len(batch))]
    batch = [replace(group, environment=label) for group, label in zip(batch, labels, strict=True)]
    assigned = made.assign(batch)
    trained = [group for group in batch if group.environment != "measured"]
    echoed = iter(Echo(Grpo(), 0.1).assign(trained))
    for group, credits in zip(batch, assigned, strict=True):
        if group.environment == "measured":
            assert not any(credit.mask.any() or credit.cross_entropy is not None for credit in credits)
            continue
        rewards, factor = np.array(group.rewards, np.float64), 1.0 if group.environment == "a" else weight
        wanted = (rewards - rewards.mean()) * factor / (rewards.mean() if group.environment == "a" else 1)
        first = {id(rollout[0]): index for index, rollout in enumerate(group.rollouts)}
        for sequence, credit, echo in zip(group.sequences, credits, next(echoed), strict=True):
            if id(sequence) in first:
                assert np.allclose(credit.advantages, wanted[first[id(sequence)]], rtol=1e-5, atol=1e-5)
            assert echo.cross_entropy is not None and credit.cross_entropy is not None
            assert np.allclose(credit.cross_entropy, echo.cross_entropy * np.float32(factor))

"""Statistics of evaluations against float64 references and against the true values that they estimate."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from primeslurm.orchestrator.evaluation.results import Sample, estimate_mean, pass_at_k, summarise


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_fraction_of_subsets_that_solve(samples: int) -> None:
    for solved in range(samples + 1):
        outcomes = [i < solved for i in range(samples)]
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(samples, solved, k) == pytest.approx(fmean(map(any, subsets)), abs=1e-15)


def test_pass_at_k_equals_the_formula_of_the_paper() -> None:
    """Chen et al. 2021, figure 3: 1 - prod(1 - k / range(n - c + 1, n + 1))."""
    for n, c, k in ((200, 13, 10), (200, 199, 1), (4096, 7, 512), (4096, 0, 100)):
        reference = 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1, dtype=np.float64)) if n - c >= k else 1.0
        assert pass_at_k(n, c, k) == pytest.approx(reference, rel=1e-12, abs=1e-15)


def clustered(examples: np.ndarray) -> float:
    """Clustered standard error (Miller 2024, equation 4) of rewards [examples, samples], with n / (n - 1) of CR1."""
    n = len(examples)
    residuals = examples - examples.mean()
    return float(np.sqrt(n / (n - 1) * (residuals.sum(axis=1) ** 2).sum()) / examples.size)


def test_standard_error_is_clustered_by_example() -> None:
    generator = np.random.default_rng(1)
    rewards = generator.normal(generator.normal(0, 1, (40, 1)), 0.2, (40, 8))  # samples of an example are alike
    result = estimate_mean([float(mean) for mean in rewards.mean(axis=1)])
    assert result.value == pytest.approx(rewards.mean(), rel=1e-12)
    assert result.stderr == pytest.approx(clustered(rewards), rel=1e-12)
    by_sample = rewards.std(ddof=1) / np.sqrt(rewards.size)
    assert result.stderr > 2 * by_sample, "samples treated as independent give too small an error"
    assert estimate_mean([0.5]).stderr is None


def test_summary_of_an_environment() -> None:
    solved = Sample("w", 0, 0, reward=1.0, tokens=10, turns=2, finish_reason="stop", metrics={"own": 3.0})
    cut_off = Sample("w", 0, 1, reward=0.25, tokens=30, turns=4, finish_reason="length")
    wrong = Sample("w", 1, 0, reward=0.5, tokens=20, turns=3, finish_reason="stop", metrics={"own": 5.0})
    failed = Sample("w", 1, 1, error="the tool is gone")
    result = summarise("w", [solved, cut_off, wrong, failed], (1, 2), solved_reward=1.0)
    assert (result.examples, result.samples) == (2, 2)
    assert result.reward.value == pytest.approx((0.625 + 0.25) / 2), "a failed sample counts as 0"
    assert result.reward.stderr == pytest.approx(np.std([0.625, 0.25], ddof=1) / np.sqrt(2))
    assert {k: each.value for k, each in result.pass_at.items()} == {1: 0.25, 2: 0.5}
    assert result.failed == 0.25 and result.truncated == pytest.approx(1 / 3)
    assert result.length == 20 and result.turns == 3 and result.metrics == {"own": 4.0}
    row = result.row()
    assert row["reward_mean"] == result.reward.value and row["pass@2_stderr"] == result.pass_at[2].stderr
    assert row["metrics/own"] == 4.0


def test_failed_sample_never_solves() -> None:
    result = summarise("w", [Sample("w", 0, 0, error="gone"), Sample("w", 1, 0)], (1,), solved_reward=0.0)
    assert result.pass_at[1].value == 0.5

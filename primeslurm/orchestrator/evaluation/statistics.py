"""Results of an evaluation: means over examples, with standard errors, and pass@k.

Samples of the same example are alike, so only examples are independent draws. The standard error is therefore that of
the means of examples (clustered standard errors: Miller, "Adding Error Bars to Evals", 2024, section 2.2; the two are
equal for clusters of equal size).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

import msgspec

from primeslurm.records.evaluation import Estimated, LabelResult


class _EndedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a rollout that has ended."""

    reward: float = 0.0
    tokens: int = 0
    """Number of sampled tokens."""
    turns: int = 0
    finish_reason: str = ""
    seconds: float = 0.0
    oldest_version: int = -1
    """Oldest policy version that sampled a token; -1 if no token was sampled."""
    newest_version: int = -1
    metrics: dict[str, float] = {}
    error: str | None = None
    """Error of the last try. The reward is then 0."""


class SampleResult(_EndedRollout, frozen=True):
    """One rollout of an evaluation, listed under its example."""

    sample: int


class Sample(_EndedRollout, frozen=True):
    """One rollout of an evaluation that has ended."""

    label: str
    example: int
    sample: int

    @property
    def result(self) -> SampleResult:
        return SampleResult(**{name: getattr(self, name) for name in SampleResult.__struct_fields__})


def estimate_mean(values: Sequence[float]) -> Estimated:
    """Return the mean of independent values, and its standard error s / sqrt(n), with s^2 over n - 1."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimated(mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Estimated(mean, math.sqrt(variance / len(values)))


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples solves an example.

    1 - C(samples - solved, k) / C(samples, k) (Chen et al., "Evaluating Large Language Models Trained on Code", 2021,
    equation 1).
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def summarise(label: str, samples: Collection[Sample], passes: Sequence[int], solved_reward: float) -> LabelResult:
    """Compute the results of one environment.

    Args:
        label: label of the environment.
        samples: its samples, the same number for each example.
        passes: the values of k for pass@k.
        solved_reward: a sample with at least this reward has solved its example.
    """
    by_example: Mapping[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_example[sample.example].append(sample)
    examples = list(by_example.values())
    solved = [sum(sample.reward >= solved_reward and sample.error is None for sample in group) for group in examples]
    sizes = [len(group) for group in examples]
    # Failed samples count as reward 0. Lengths, turns and metrics describe only samples that ran to their end.
    successes = [sample for sample in samples if sample.error is None]
    metrics: Mapping[str, list[float]] = defaultdict(list)
    for sample in successes:
        for name, value in sample.metrics.items():
            metrics[name].append(value)
    return LabelResult(
        label=label,
        examples=len(examples),
        samples=max(sizes),
        reward=estimate_mean([fmean(sample.reward for sample in group) for group in examples]),
        pass_at={k: estimate_mean([pass_at_k(n, c, k) for n, c in zip(sizes, solved, strict=True)]) for k in passes},
        failed=1 - len(successes) / len(samples),
        truncated=fmean([sample.finish_reason == "length" for sample in successes] or [0.0]),
        length=fmean([sample.tokens for sample in successes] or [0.0]),
        turns=fmean([sample.turns for sample in successes] or [0.0]),
        metrics={name: fmean(values) for name, values in metrics.items()},
    )

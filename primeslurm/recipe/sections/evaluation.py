"""Evaluation during a run: environments, interval, and the number of rollouts."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.sections.orchestrator import HOTTEST, AnyEnvironment

# Metric that every evaluation environment has.
REWARD_MEAN = "reward_mean"


class EvaluationSampling(Section):
    """Sampling parameters of evaluation rollouts."""

    temperature: float = Field(1.0, ge=0, le=HOTTEST)
    """Sampling temperature, from 0 to 2. 0: greedy decoding."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this total probability. 1: from all tokens."""
    top_k: int = -1
    """Sample from this many most likely tokens. -1: from all tokens."""
    max_tokens: PositiveInt | None = None
    """Largest number of new tokens per turn. Default: as many as the longest sequence of the engines allows."""


class EvaluationEnvironment(AnyEnvironment):
    """An environment that measures the policy. It has its own worker processes and is never trained on."""

    sampling: EvaluationSampling = EvaluationSampling()
    """Sampling parameters of these rollouts."""
    examples: PositiveInt = 64
    """Number of tasks to evaluate, counted from the start of the taskset; all tasks if it has fewer."""
    samples: PositiveInt = 1
    """Rollouts of each example. pass@k is reported for k = 1, 2, 4, ... and this number."""
    solved_reward: float = 0.5
    """A rollout with this reward or more has solved its example. pass@k counts these."""

    @property
    def passes(self) -> tuple[int, ...]:
        """Values of k for pass@k: powers of two below the number of samples, and that number."""
        powers = (1 << i for i in range(self.samples.bit_length()))
        return tuple(sorted({*(k for k in powers if k < self.samples), self.samples}))

    @property
    def comparable(self) -> tuple[str, ...]:
        """Metrics of which a higher value is better, for `keep_best`."""
        return (REWARD_MEAN, *(f"pass@{k}" for k in self.passes))


class Evaluation(Section):
    """Evaluation on the same engines as training, while training continues. The final policy is always evaluated."""

    environments: tuple[EvaluationEnvironment, ...]
    """Environments to evaluate on, for example `[{id: math-problems, name: held-out, args: {path: test.jsonl}}]`."""
    interval: PositiveInt = 50
    """Steps between two evaluations. An evaluation that becomes due during another one waits; if several wait, only the
    newest runs."""
    at_start: bool = False
    """Also evaluate the model before the first step."""
    max_inflight_rollouts: PositiveInt | None = None
    """Largest number of evaluation rollouts in flight, in addition to those of training. Default: a quarter of
    training's."""
    keep_best: str | None = Field(None, pattern=r"^[\w.-]+/[\w.@-]+$")
    """Keep the checkpoint with the highest value of a metric in addition to `checkpoint.keep`. Written as LABEL/METRIC,
    for example `held-out/pass@4` or `held-out/reward_mean`. Default: no checkpoint is kept as the best."""

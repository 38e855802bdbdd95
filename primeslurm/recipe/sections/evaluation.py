"""What is evaluated during a run, how often, and how much of the engines that may take."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.sections.orchestrator import HOTTEST, AnyEnvironment

REWARD_MEAN = "reward_mean"


class EvaluationSampling(Section):
    """Sampling parameters of evaluation rollouts."""

    temperature: float = Field(1.0, ge=0, le=HOTTEST)
    """0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    max_tokens: PositiveInt | None = None
    """New tokens per turn. Default: what the engines' longest sequence leaves."""


class EvaluationEnvironment(AnyEnvironment):
    """An environment that the policy is evaluated on, in worker processes of its own. Nothing of it is trained."""

    sampling: EvaluationSampling = EvaluationSampling()
    examples: PositiveInt = 64
    """The first so many tasks of the taskset; all, if it has fewer."""
    samples: PositiveInt = 1
    """Rollouts of each example. pass@k is told for 1, 2, 4, ... and this many."""
    solved_reward: float = 0.5
    """A rollout with this reward or more has solved its example: what pass@k counts."""

    @property
    def passes(self) -> tuple[int, ...]:
        """Every k of pass@k: powers of two below the number of samples, and that number."""
        powers = (1 << i for i in range(self.samples.bit_length()))
        return tuple(sorted({*(k for k in powers if k < self.samples), self.samples}))

    @property
    def comparable(self) -> tuple[str, ...]:
        """Names of the metrics of which more is better, by which a checkpoint may be kept."""
        return (REWARD_MEAN, *(f"pass@{k}" for k in self.passes))


class Evaluation(Section):
    """Evaluation on the engines that training samples from, while it goes on. The final policy is always evaluated."""

    environments: tuple[EvaluationEnvironment, ...]
    interval: PositiveInt = 50
    """Steps from one evaluation to the next. One that is due while another runs waits for it; of several that wait, the
    newest is made."""
    at_start: bool = False
    """Also evaluate the model as it is before the first step."""
    max_inflight_rollouts: PositiveInt | None = None
    """Evaluation rollouts in flight at once, beside those of training. Default: a quarter of those."""
    keep_best: str | None = Field(None, pattern=r"^[\w.-]+/[\w.@-]+$")
    """<label of an evaluation environment>/<reward_mean or pass@k>: the checkpoint with the highest value is kept
    beyond `checkpoint.keep`."""

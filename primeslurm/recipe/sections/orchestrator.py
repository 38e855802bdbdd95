"""What the orchestrator does: environments, sampling, batches, staleness."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import EnvironmentId, ImportPath, Json, Label
from primeslurm.recipe.sections.curriculum import Curriculum
from primeslurm.recipe.sections.filters import Filters
from primeslurm.recipe.sections.length_penalties import LengthPenalty
from primeslurm.recipe.sections.sandboxes import Harness, Runtime
from primeslurm.recipe.sections.staleness import Staleness

AdvantageRule = Literal["grpo", "max_rl", "opd", "rae", "hierarchical_grpo"]
COLDEST, HOTTEST = 0.01, 2.0
"""Temperatures that vLLM samples at. It takes lower ones for 0.01, while the trainer divides by what is written."""
RAE_DECAY = 0.95
"""As in SPIRAL."""


class SamplingChanges(Section):
    """What one environment samples otherwise than `orchestrator.sampling` says. Default: as that says."""

    temperature: float | None = Field(None, ge=COLDEST, le=HOTTEST)
    top_p: float | None = Field(None, gt=0, le=1)
    """Only 1: training draws from the whole distribution."""
    top_k: int | None = None
    """Only -1 or 0: as top_p."""
    max_tokens: PositiveInt | None = None


class AnyEnvironment(Section):
    """One verifiers environment, run in its own worker processes."""

    id: EnvironmentId
    """Name of a bundled (`reverse-text`) or installed verifiers environment."""
    name: Label | None = None
    """Label in metrics and logs. Default: the id, with - for what a file name cannot hold."""
    args: dict[str, Json] = {}
    """Options of the environment's taskset; under `env`, options of the verifiers Env around it (agents, timeouts)."""
    workers: int = Field(1, ge=1, le=4096)
    """Worker processes."""
    harness: Harness | None = None
    """The program that talks to the model. Default: the environment's own, or bash."""
    runtime: Runtime | None = None
    """What the rollout's programs run in. Default: apptainer for a harness that needs a container, else subprocess."""
    load_timeout_s: PositiveInt = 120
    """It and its first task must be there after so many seconds, when it is tried before a run."""

    @property
    def label(self) -> str:
        """The name used in process names, metrics and logs."""
        return self.name or re.sub(r"[@/]", "-", self.id)


class Environment(AnyEnvironment):
    """An environment that the policy is trained on."""

    ratio: PositiveFloat = 1.0
    """Share of the groups that this environment gets."""
    sampling: SamplingChanges = SamplingChanges()
    group_size: PositiveInt | None = None
    """Default: `orchestrator.group_size`."""
    advantages: AdvantageRule | None = None
    """Default: as `orchestrator.advantages` or `orchestrator.algorithm` says."""
    weight: NonNegativeFloat = 1.0
    """Factor of its advantages, and of what is trained by cross-entropy. 0: sampled and measured, not trained."""
    filters: Filters | None = None
    """Default: `orchestrator.filters`; `[]` for none."""
    shuffle: bool = True
    """Examples come in another order each epoch, fixed by the seed. false: the first one has the taskset's own."""
    curriculum: Curriculum | None = None
    """Draws examples by difficulty instead."""
    solved_reward: float = 0.5
    """A rollout with this reward or more has solved its example: for `curriculum`, and the metric `solve_rate`."""
    length_penalty: LengthPenalty | None = None
    """What long rollouts lose of their reward before advantages are made of it. Metrics show rewards without it."""


class Sampling(Section):
    """Sampling parameters of training rollouts."""

    temperature: float = Field(1.0, ge=COLDEST, le=HOTTEST)
    top_p: float = Field(1.0, gt=0, le=1)
    """Only 1: training draws from the whole distribution, or importance ratios are wrong. Evaluation has its own."""
    # Recipes that runs of earlier versions have recorded may say less.
    top_k: int = -1
    """Only -1 or 0: as top_p."""
    max_tokens: PositiveInt | None = None
    """New tokens per turn. Default: what seq_len leaves."""


class CustomAlgorithm(Section):
    """An algorithm of one's own, which must be importable wherever the orchestrator and environments run.

    The function is called with kwargs, and returns an `Algorithm` as described in
    `primeslurm/orchestrator/algorithms/protocol.py`; a class derived from it is such a function.
    """

    type: Literal["custom"] = "custom"
    function: ImportPath
    """For example my_package.algorithms:LeaveOneOut."""
    kwargs: dict[str, Json] = {}
    """Its arguments, by name."""


class Orchestrator(Section):
    """Dispatch of rollouts and forming of batches."""

    batch_size: PositiveInt = 128
    """Rollouts per step; a multiple of each environment's group_size. Where filters or `staleness` make groups
    smaller, a step may have more, by less than a group."""
    group_size: PositiveInt = 8
    """Rollouts of one prompt; advantages are relative to the group's mean."""
    advantages: AdvantageRule = "grpo"
    """grpo: reward minus the group's mean. max_rl: that over the mean, which favours rare success; rewards must not be
    negative. opd (on-policy distillation): each token's log-probability by the teacher minus the engine's. Of several
    agents, each is compared with its own rewards. rae: reward minus a running mean of the agent's, for self-play.
    hierarchical_grpo: as grpo, but some agents are compared within each rollout."""
    opd_reward: NonNegativeFloat = 0.0
    """With `advantages: opd`: also the reward minus the group's mean, times this. 0: rewards are only reported."""
    rae_decay: float = Field(RAE_DECAY, ge=0, lt=1)
    """With `advantages: rae`: share of the running mean that each new reward leaves."""
    within_rollout: tuple[str, ...] = ()
    """With `advantages: hierarchical_grpo`: agents of the environment whose rewards are compared within each rollout,
    as several of them had the same task there."""
    algorithm: CustomAlgorithm | None = None
    """Your own in place of `advantages`. `echo` adds to it."""
    echo: PositiveFloat | None = None
    """Also train on what environments answered (tool and user messages after the policy's first answer), by
    cross-entropy times this; 0.1 is usual. Default: those tokens are context only."""
    max_inflight_rollouts: PositiveInt | None = None
    """Most rollouts in flight at once. Default: twice batch_size."""
    concurrency: Literal["adaptive", "static"] = "adaptive"
    """adaptive: up to that number, as many run on each replica as its engines do the most with, found by their KV use,
    preemptions, queues and prefix cache. static: that number, whatever engines say."""
    filters: Filters = ()
    """Which finished rollouts and groups are not trained. A rollout is counted by each one that applies to it."""
    oversampling: float = Field(1.0, ge=1, le=16)
    """Rollouts that run for each one that a batch needs, where filters leave some out: 1 / the share that is kept. What
    is kept beyond a batch waits for the next one, if it is not too old then."""
    max_off_policy_steps: NonNegativeInt = 8
    """A batch for step s only holds rollouts whose group opened at a version >= s-1-max_off_policy_steps."""
    rollout_transport: Literal["zmq", "filesystem"] = "zmq"
    """How batches get to the trainer's ranks. zmq: they are sent. filesystem: each rank reads its share, which the
    orchestrator writes below the run directory; for networks between nodes that are slower than the file system."""
    staleness: Staleness = Staleness()
    """What becomes of groups that get older than that, and of stragglers."""
    sampling: Sampling = Sampling()
    request_timeout_s: PositiveInt = 1800
    """Longest wait for one generation request; it is then tried again."""
    hang_timeout_s: PositiveInt = 120
    """The orchestrator is started again if its event loop stands still for this long."""
    worker_hang_timeout_s: PositiveInt = 300
    """An environment worker is started again if its event loop stands still for this long: code of its environment may
    block it. Its rollouts run elsewhere long before that."""
    stall_timeout_s: PositiveInt = 1800
    """No token, no finished rollout and no new policy for this long ends the attempt with the suspect named."""

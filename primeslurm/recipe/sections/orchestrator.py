"""Environments, sampling, advantages, batches and staleness."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import EnvironmentId, HeaderName, ImportPath, Json, Label
from primeslurm.recipe.sections.curriculum import Curriculum
from primeslurm.recipe.sections.filters import Filters
from primeslurm.recipe.sections.length_penalties import LengthPenalty
from primeslurm.recipe.sections.sandboxes import Harness, Runtime
from primeslurm.recipe.sections.staleness import Staleness

# Properties of a rollout that headers of its requests can have.
StateField = Literal["trajectory_id", "rollout_id", "group_id", "example_id", "environment"]
AdvantageRule = Literal["grpo", "max_rl", "opd", "rae", "hierarchical_grpo"]
# Range of temperatures. vLLM raises lower ones to 0.01, while the trainer would divide by the recipe's value.
COLDEST, HOTTEST = 0.01, 2.0
# Default of SPIRAL (arXiv 2506.24119).
RAE_DECAY = 0.95
# Least values of the time limits that the planner derives [s]
REQUEST_S, STALL_S = 1800, 1800


class SamplingChanges(Section):
    """Sampling parameters of one environment that differ from `orchestrator.sampling`."""

    temperature: float | None = Field(None, ge=COLDEST, le=HOTTEST)
    """Sampling temperature of this environment, from 0.01 to 2. Default: that of `orchestrator.sampling`."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Only 1 is allowed, because training needs samples from the whole distribution."""
    top_k: int | None = None
    """Only -1 or 0 are allowed, because training needs samples from the whole distribution."""
    max_tokens: PositiveInt | None = None
    """Largest number of new tokens per turn. Default: that of `orchestrator.sampling`."""


class AnyEnvironment(Section):
    """One verifiers environment, run in its own worker processes."""

    id: EnvironmentId
    """Name of a bundled environment (reverse-text, arithmetic, math-problems, tool-use, harbor-local) or of another
    installed verifiers environment."""
    name: Label | None = None
    """Label of the environment in metrics and logs. Default: its id, with - for characters that file names cannot
    hold."""
    args: dict[str, Json] = {}
    """Options of the environment's taskset, for example `{path: /shared/data/train.jsonl}`. The key `env` holds options
    of the verifiers Env, such as agents and timeouts."""
    workers: int = Field(1, ge=1, le=4096)
    """Number of worker processes. One worker serves about 16 to 64 rollouts."""
    harness: Harness | None = None
    """The program that talks to the model, for example `{id: mini_swe_agent}`. Default: the harness of the environment,
    or bash."""
    runtime: Runtime | None = None
    """Where the programs of a rollout run. Default: apptainer for a harness that needs a container, else subprocess."""
    load_timeout_s: PositiveInt = 120
    """Seconds that the environment and its first task may take to load when `check`, `submit` or a node's preflight
    tries them."""

    @property
    def label(self) -> str:
        """The name used in process names, metrics and logs."""
        return self.name or re.sub(r"[@/]", "-", self.id)


class Environment(AnyEnvironment):
    """An environment that the policy is trained on."""

    ratio: PositiveFloat = 1.0
    """Share of the groups that this environment gets, relative to the other environments."""
    sampling: SamplingChanges = SamplingChanges()
    """Sampling parameters that differ for this environment."""
    group_size: PositiveInt | None = None
    """Rollouts of one prompt of this environment. Default: `orchestrator.group_size`."""
    advantages: AdvantageRule | None = None
    """Rule that computes advantages from rewards of this environment. Default: `orchestrator.advantages`, or
    `orchestrator.algorithm`."""
    weight: NonNegativeFloat = 1.0
    """Factor of this environment's advantages and cross-entropy. 0: rollouts are sampled and measured, but not
    trained."""
    filters: Filters | None = None
    """Filters for this environment. Default: `orchestrator.filters`. `[]`: no filters."""
    shuffle: bool = True
    """true: examples come in a different order in each epoch, fixed by the seed. false: the first epoch keeps the order
    of the taskset."""
    curriculum: Curriculum | None = None
    """Draw examples by difficulty instead of once per epoch. Default: no curriculum."""
    solved_reward: float = 0.5
    """A rollout with this reward or more has solved its example. `curriculum` and the metric `solve_rate` use this."""
    length_penalty: LengthPenalty | None = None
    """Penalty for long rollouts, subtracted from the reward before advantages are computed. Reward metrics do not
    include it. Default: no penalty."""


class Sampling(Section):
    """Sampling parameters of training rollouts."""

    temperature: float = Field(1.0, ge=COLDEST, le=HOTTEST)
    """Sampling temperature, from 0.01 to 2. The trainer divides logits by the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only 1 is allowed, because training needs samples from the whole distribution. Evaluation has its own
    `sampling`."""
    # Recorded recipes of earlier versions may have values below 1.
    top_k: int = -1
    """Only -1 or 0 are allowed, because training needs samples from the whole distribution."""
    max_tokens: PositiveInt | None = None
    """Largest number of new tokens per turn. Default: as many as `seq_len` leaves."""


class CustomAlgorithm(Section):
    """Your own algorithm.

    It must be importable wherever the orchestrator and the environments run. The function is called with `kwargs` and
    returns an `Algorithm` as described in `primeslurm/orchestrator/algorithms/protocol.py`. It may also be a subclass
    of `Algorithm`.
    """

    type: Literal["custom"] = "custom"
    function: ImportPath
    """Import path of the class or function, for example `my_package.algorithms:LeaveOneOut`."""
    kwargs: dict[str, Json] = {}
    """Keyword arguments of the function."""


class Orchestrator(Section):
    """Dispatch of rollouts, and batches."""

    batch_size: PositiveInt = 128
    """Rollouts per step (not prompts). Must be a multiple of every `group_size`. If filters or `staleness` make groups
    smaller, a step may hold a few rollouts more, less than one group."""
    group_size: PositiveInt = 8
    """Rollouts of one prompt. Advantages compare the rollouts of a group."""
    advantages: AdvantageRule = "grpo"
    """Rule that computes advantages from rewards. grpo: reward minus the group's mean. max_rl: the same divided by the
    mean, which favours rare success; rewards must not be negative. opd: on-policy distillation, the teacher's
    log-probability minus the engine's, per token. rae: reward minus a running mean of the same agent, for self-play.
    hierarchical_grpo: as grpo, but agents in `within_rollout` are compared within each rollout."""
    opd_reward: NonNegativeFloat = 0.0
    """With `advantages: opd`, also add the reward minus the group's mean, times this factor. 0: rewards are only
    reported."""
    rae_decay: float = Field(RAE_DECAY, ge=0, lt=1)
    """With `advantages: rae`, the weight of the old running mean when a new reward is added."""
    within_rollout: tuple[str, ...] = ()
    """With `advantages: hierarchical_grpo`, names of agents whose rewards are compared within each rollout, because
    several of them solve the same task there. For example `[solver]`."""
    algorithm: CustomAlgorithm | None = None
    """Your own algorithm instead of `advantages`. `echo` can be combined with it. Default: the rule of `advantages`."""
    echo: PositiveFloat | None = None
    """Also train on the answers of environments (tool and user messages after the policy's first answer), by
    cross-entropy times this factor; 0.1 is usual. Default: these tokens are context only."""
    max_inflight_rollouts: PositiveInt | None = None
    """Largest number of rollouts in flight at once. Default: twice `batch_size`."""
    concurrency: Literal["adaptive", "static"] = "adaptive"
    """adaptive: find for each replica the number of rollouts at which its engines do the most work, up to
    `max_inflight_rollouts`. static: always run `max_inflight_rollouts`."""
    filters: Filters = ()
    """Which finished rollouts and groups are not trained, for example `[{type: zero_advantage}, {type: truncated}]`. A
    rollout is counted by each filter that applies to it."""
    oversampling: float = Field(1.0, ge=1, le=16)
    """Rollouts to run per rollout that a batch needs, to make up for filtered ones. A good value is 1 / the fraction
    that is kept. Surplus groups wait for the next batch."""
    max_off_policy_steps: NonNegativeInt = 8
    """Staleness limit. A batch for step s holds only rollouts whose group started at version s - 1 -
    max_off_policy_steps or later. 0: on-policy."""
    rollout_transport: Literal["zmq", "filesystem"] = "zmq"
    """Transport of batches to the trainer. zmq: over the network. filesystem: each rank reads its rows from the run
    directory, for clusters whose file system is faster than the network between nodes."""
    staleness: Staleness = Staleness()
    """Handling of groups older than `max_off_policy_steps`, and of groups with a straggler."""
    sampling: Sampling = Sampling()
    """Sampling parameters of training rollouts."""
    request_timeout_s: PositiveInt | None = None
    """Seconds that one generation request may take. After that it is retried. Default: three times the estimate of the
    longest turn, at least 30 minutes. `plan --verbose` shows it."""
    extra_headers_from_state: dict[HeaderName, StateField] = {}
    """Further HTTP headers of generation requests, for routers and proxies, for example `{X-Group-ID: group_id}`. Each
    gets a value of its rollout: trajectory_id (one agent's conversation), rollout_id, group_id, example_id or
    environment. With `consistent_hash`, and with `kv_aware` unless engines only prefill, requests with the same
    X-Session-ID reach the same engine. It is trajectory_id unless you set it here."""
    hang_timeout_s: PositiveInt = 120
    """Seconds for which the orchestrator's event loop may be blocked. After that it is restarted."""
    worker_hang_timeout_s: PositiveInt = 300
    """Seconds for which an environment worker's event loop may be blocked, for example by code of its environment.
    After that it is restarted; its rollouts are reassigned much earlier."""
    stall_timeout_s: PositiveInt | None = None
    """Seconds without a new token, a finished rollout or a new policy after which the attempt ends. The report names
    the suspected process. Default: 1.5 times the estimate of the longest step, at least 30 minutes."""

    @property
    def request_s(self) -> int:
        """Seconds that one generation request may take."""
        return self.request_timeout_s or REQUEST_S

    @property
    def stall_s(self) -> int:
        """Seconds without progress after which the attempt ends."""
        return self.stall_timeout_s or STALL_S

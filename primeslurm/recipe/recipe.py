"""The recipe as a whole. Rules that span sections are in `rules.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import EnvironmentName, RunName
from primeslurm.recipe.sections.deployment import Deployment
from primeslurm.recipe.sections.evaluation import Evaluation, EvaluationEnvironment, EvaluationSampling
from primeslurm.recipe.sections.filters import Filters
from primeslurm.recipe.sections.inference import Inference
from primeslurm.recipe.sections.orchestrator import AnyEnvironment, Environment, Orchestrator, Sampling
from primeslurm.recipe.sections.slurm import MetricsOptions, Monitor, Slurm
from primeslurm.recipe.sections.teacher import Teacher
from primeslurm.recipe.sections.trainer import Checkpoint, Model, Sft, Trainer, Weights


class Recipe(Section):
    """A whole run. A recipe names no host, partition or path of a cluster, so it runs on any cluster."""

    schema_: Literal[1] = Field(1, alias="schema")
    """Version of the recipe format. Always 1."""
    name: RunName
    """Name of the run and of its run directory, for example `math-30b`."""
    task: Literal["rl", "sft", "serve", "eval"] = "rl"
    """rl: asynchronous RL with trainer, engines and environments. sft: supervised fine-tuning; only the trainer runs.
    serve: engines and routers run until you cancel them. eval: engines evaluate `model` once on the environments of
    `evaluation`."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of all random choices, from 0 to 2^32 - 1."""
    max_steps: PositiveInt = 1000
    """Number of optimizer steps of the whole run."""
    seq_len: PositiveInt
    """Longest trained sequence in tokens. Sequences are packed into rows of this length."""
    model: Model
    """The model that is trained, served or evaluated."""
    trainer: Trainer = Trainer()
    """Optimizer, loss, parallelism and memory of the trainer."""
    weights: Weights = Weights()
    """How new weights reach the engines."""
    checkpoint: Checkpoint = Checkpoint()
    """How often checkpoints are written and how many are kept."""
    environments: tuple[Environment, ...] = ()
    """Environments that the policy is trained on, for example `[{id: math-problems, args: {path: train.jsonl}}]`. RL
    needs at least one."""
    orchestrator: Orchestrator = Orchestrator()
    """Batch and group size, advantages, sampling and staleness."""
    evaluation: Evaluation | None = None
    """Environments that measure the policy during the run. Default: no evaluation."""
    inference: Inference = Inference()
    """Settings of the vLLM engines and their router."""
    teacher: Teacher | None = None
    """A second model that returns log-probabilities of sampled tokens. `trainer.loss.ref_kl` and
    `orchestrator.advantages: opd` need one. Default: no teacher."""
    sft: Sft | None = None
    """Data and batch size of supervised fine-tuning. Needed for `task: sft`."""
    deployment: Deployment = Deployment()
    """How many nodes and GPUs each role gets."""
    slurm: Slurm = Slurm()
    """Slurm options of the job, such as time limit, account and partition per role."""
    monitor: Monitor = Monitor()
    """Where metrics are logged besides `metrics.jsonl`."""
    pass_env: tuple[EnvironmentName, ...] = ()
    """Names of environment variables that processes receive from the shell you submit from, for example
    `[WANDB_API_KEY]`. Their values are never written to a file."""

    @property
    def samples(self) -> bool:
        """Whether rollouts are sampled, by engines that know their policy's version."""
        return self.task in ("rl", "eval")

    @property
    def max_inflight(self) -> int:
        """Rollouts in flight at once."""
        return self.orchestrator.max_inflight_rollouts or 2 * self.orchestrator.batch_size

    @property
    def max_len(self) -> int:
        """Longest sequence an engine accepts, in tokens."""
        return self.model.max_len or self.seq_len

    @property
    def max_evaluation_inflight(self) -> int:
        """Evaluation rollouts in flight at once."""
        own = self.evaluation.max_inflight_rollouts if self.evaluation else None
        return own or max(1, self.max_inflight // (1 if self.task == "eval" else 4))

    @property
    def evaluation_environments(self) -> tuple[EvaluationEnvironment, ...]:
        """Environments that the policy is evaluated on."""
        return self.evaluation.environments if self.evaluation else ()

    def environment(self, label: str) -> AnyEnvironment:
        """Find an environment, of training or of evaluation. Raises KeyError."""
        return {each.label: each for each in self.all_environments}[label]

    @property
    def all_environments(self) -> tuple[AnyEnvironment, ...]:
        """Every environment that has worker processes: those of training, then those of evaluation."""
        return (*self.trained_environments, *self.evaluation_environments)

    @property
    def trained_environments(self) -> tuple[Environment, ...]:
        """Environments that the policy is trained on, if it is."""
        return self.environments if self.task == "rl" else ()

    def group_size(self, environment: Environment) -> int:
        """Rollouts of one of the environment's prompts."""
        return environment.group_size or self.orchestrator.group_size

    def sampling(self, environment: AnyEnvironment) -> Sampling | EvaluationSampling:
        """Sampling parameters of the environment's rollouts."""
        if isinstance(environment, EvaluationEnvironment):
            return environment.sampling
        assert isinstance(environment, Environment)
        changes = environment.sampling.model_dump(exclude_none=True)
        return self.orchestrator.sampling.model_copy(update=changes)

    def filters(self, environment: Environment) -> Filters:
        """Return the filters that the environment's rollouts have to pass."""
        return self.orchestrator.filters if environment.filters is None else environment.filters

    def commits(self, step: int) -> bool:
        """Tell whether a step ends with a checkpoint in any case: one of the interval, or the last."""
        return step % self.checkpoint.interval == 0 or step == self.max_steps

    def metrics_options(self) -> MetricsOptions:
        """Say where metrics go besides metrics.jsonl."""
        wandb = self.monitor.wandb
        if wandb is None:
            return {"tensorboard": self.monitor.tensorboard, "wandb": None}
        told = {"name": self.name, "config": self.model_dump(mode="json", by_alias=True)}
        return {"tensorboard": self.monitor.tensorboard, "wandb": wandb.model_dump() | told}

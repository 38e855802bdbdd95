"""The recipe, and values that follow from several of its sections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import EnvironmentName, RunName
from primeslurm.recipe.sections.deployment import Deployment
from primeslurm.recipe.sections.evaluation import Evaluation, EvaluationEnvironment, EvaluationSampling
from primeslurm.recipe.sections.filters import Filters
from primeslurm.recipe.sections.inference import Inference
from primeslurm.recipe.sections.monitor import Logging, MetricsOptions, Monitor
from primeslurm.recipe.sections.orchestrator import AnyEnvironment, Environment, Orchestrator, Sampling
from primeslurm.recipe.sections.slurm import Slurm
from primeslurm.recipe.sections.teacher import Teacher
from primeslurm.recipe.sections.tenant import Tenant
from primeslurm.recipe.sections.tenant_deployment import Tenants
from primeslurm.recipe.sections.trainer import Checkpoint, Model, Sft, Trainer, Weights


class Recipe(Section):
    """A whole run. A recipe names no host, partition or path of a cluster, so it runs on any cluster."""

    schema_: Literal[1] = Field(1, alias="schema")
    """Version of the recipe format. Always 1."""
    name: RunName
    """Name of the run and of its run directory, for example `math-30b`."""
    task: Literal["rl", "sft", "serve", "eval", "tenants"] = "rl"
    """rl: asynchronous RL with trainer, engines and environments. sft: supervised fine-tuning; only the trainer runs.
    serve: engines and routers run until you cancel them. eval: engines evaluate `model` once on the environments of
    `evaluation`. tenants: a Tinker service and engines run until you cancel them, and tenants train adapters of
    `model` on them (`primeslurm tenant`)."""
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
    """Transport of new weights to the engines."""
    checkpoint: Checkpoint = Checkpoint()
    """Interval of checkpoints, and number of checkpoints to keep."""
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
    tenants: Tenants | None = None
    """Limits of a deployment. Needed for `task: tenants`."""
    tenant: Tenant | None = None
    """Train an adapter on a deployment (`task: tenants`), which has the model, the trainer and the engines. Default:
    the run has its own."""
    deployment: Deployment = Deployment()
    """Number of nodes and GPUs of each role."""
    slurm: Slurm = Slurm()
    """Slurm options of the job, such as time limit, account and partition per role."""
    monitor: Monitor = Monitor()
    """Where metrics are logged besides `metrics.jsonl`."""
    logging: Logging = Logging()
    """Level and format of the log lines of all processes."""
    pass_env: tuple[EnvironmentName, ...] = ()
    """Names of environment variables that processes receive from the shell you submit from, for example
    `[WANDB_API_KEY]`. Their values are never written to a file."""

    @property
    def samples(self) -> bool:
        """True if the task samples rollouts."""
        return self.task in ("rl", "eval")

    @property
    def sends_adapter(self) -> bool:
        """True if engines load only the LoRA adapter of each policy. False if the plan has yet to decide.

        The engines of a tenant's run load nothing: requests name the adapter of a version.
        """
        lora = self.trainer.lora
        return self.task == "rl" and self.tenant is None and lora is not None and lora.engines == "adapter"

    @property
    def colocated(self) -> bool:
        """True if trainer and engines share GPUs. Only `task: rl` has both."""
        return self.task == "rl" and self.deployment.colocated

    @property
    def trainer_memory_share(self) -> float:
        """Fraction of each GPU's memory for the trainer, from 0 to 1."""
        return 1 - (self.inference.gpu_memory_utilization or 0) if self.colocated else 1.0

    @property
    def max_inflight(self) -> int:
        """Largest number of training rollouts in flight."""
        return self.orchestrator.max_inflight_rollouts or 2 * self.orchestrator.batch_size

    @property
    def max_len(self) -> int:
        """Longest sequence an engine accepts, in tokens."""
        return self.model.max_len or self.seq_len

    @property
    def max_evaluation_inflight(self) -> int:
        """Largest number of evaluation rollouts in flight."""
        limit = self.evaluation.max_inflight_rollouts if self.evaluation else None
        return limit or max(1, self.max_inflight // (1 if self.task == "eval" else 4))

    @property
    def evaluation_environments(self) -> tuple[EvaluationEnvironment, ...]:
        """Environments that the policy is evaluated on."""
        return self.evaluation.environments if self.evaluation else ()

    def environment(self, label: str) -> AnyEnvironment:
        """Return the environment of training or evaluation with this label. Raises KeyError."""
        return {each.label: each for each in self.all_environments}[label]

    @property
    def all_environments(self) -> tuple[AnyEnvironment, ...]:
        """All environments that have worker processes, those of training first."""
        return (*self.trained_environments, *self.evaluation_environments)

    @property
    def trained_environments(self) -> tuple[Environment, ...]:
        """Environments that the policy is trained on; none for tasks other than rl."""
        return self.environments if self.task == "rl" else ()

    def group_size(self, environment: Environment) -> int:
        """Return the number of rollouts per prompt of the environment."""
        return environment.group_size or self.orchestrator.group_size

    def sampling(self, environment: AnyEnvironment) -> Sampling | EvaluationSampling:
        """Return the sampling parameters of the environment's rollouts."""
        if isinstance(environment, EvaluationEnvironment):
            return environment.sampling
        assert isinstance(environment, Environment)
        changes = environment.sampling.model_dump(exclude_none=True)
        return self.orchestrator.sampling.model_copy(update=changes)

    def filters(self, environment: Environment) -> Filters:
        """Return the filters for the environment's rollouts."""
        return self.orchestrator.filters if environment.filters is None else environment.filters

    def commits(self, step: int) -> bool:
        """Return whether a step ends with a checkpoint, because of the interval or because it is the last step."""
        return step % self.checkpoint.interval == 0 or step == self.max_steps

    def metrics_options(self) -> MetricsOptions:
        """Return where metrics are logged besides metrics.jsonl."""
        monitor = self.monitor
        run = {"name": self.name, "config": self.model_dump(mode="json", by_alias=True)}
        return {
            "tensorboard": monitor.tensorboard,
            "wandb": None if monitor.wandb is None else monitor.wandb.model_dump() | run,
            "mlflow": None if monitor.mlflow is None else monitor.mlflow.model_dump() | run,
        }

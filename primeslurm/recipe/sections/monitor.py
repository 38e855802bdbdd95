"""Where metrics, rollouts and log lines of a run go."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from pydantic import Field, NonNegativeInt, PositiveFloat

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import TrackingUri


class Logging(Section):
    """Log lines of the run's processes, in `attempts/N/logs`."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that all roles log, engines included. `inference.env: {VLLM_LOGGING_LEVEL: DEBUG}` changes it for
    engines alone."""
    format: Literal["text", "json"] = "text"
    """json: one JSON object per line with time, level, logger, pid and message, for log collectors. Tracebacks of a
    process that dies, and lines of routers, stay text."""


class Wandb(Section):
    """Weights & Biases logging. All attempts of a run log to one W&B run with the name and id of this run."""

    project: str
    """W&B project that the run is logged to."""
    entity: str | None = None
    """W&B user or team that owns the project. Default: your default entity."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """online: send metrics during the run. offline: write them to the run directory for `wandb sync`. disabled: no
    W&B."""


class Mlflow(Section):
    """MLflow logging. All attempts of a run log to one MLflow run. The nodes need the package mlflow-skinny."""

    experiment: str = Field(min_length=1)
    """MLflow experiment that the run is logged to."""
    tracking_uri: TrackingUri
    """Address of the tracking server, for example `http://mlflow.example.org:5000`, or `databricks`. Put
    MLFLOW_TRACKING_TOKEN or other variables of MLflow in `pass_env`."""


class KeptRollouts(Section):
    """Rollouts that are kept as readable text, for `primeslurm rollouts`."""

    per_step: NonNegativeInt = 16
    """Rollouts of each step's batch that are kept, and as many of those that were dropped, and of those that failed. 0:
    none."""
    evaluations: bool = True
    """Keep all rollouts of evaluations."""
    max_gb: PositiveFloat = 4.0
    """Largest size of the archive in GB. The oldest steps are removed first, evaluations last."""


class Monitor(Section):
    """Where metrics are logged besides `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard files to `tensorboard/` of the run directory."""
    wandb: Wandb | None = None
    """Log to Weights & Biases, for example `{project: my-project}`. Also put WANDB_API_KEY in `pass_env`. Default: no
    W&B."""
    mlflow: Mlflow | None = None
    """Log to MLflow, for example `{experiment: my-project, tracking_uri: "http://mlflow.example.org:5000"}`. Default:
    no MLflow."""
    sample_interval: NonNegativeInt = 10
    """Steps between tables with eight rollouts of the batch, as text with rewards, in Weights & Biases and MLflow. 0:
    no tables."""
    peak_tflops: PositiveFloat | None = None
    """Peak rate of a trainer's GPU [TFLOP/s], of which `trainer/mfu` is the used fraction. Default: the dense peak of
    known GPUs (A100, H100, H200, B200 and others) in bfloat16, or in FP8 with `trainer.fp8`."""
    rollouts: KeptRollouts = KeptRollouts()
    """Which rollouts are kept as readable text in `rollouts/archive/` of the run directory."""


class MetricsOptions(TypedDict):
    """Keyword arguments of `records.metrics.MetricsLog`."""

    tensorboard: bool
    wandb: dict[str, Any] | None
    """Keyword arguments of `wandb.init`; None without Weights & Biases."""
    mlflow: dict[str, Any] | None
    """Options of `records.monitors.Mlflow`; None without MLflow."""

"""Events of the training loop: the trainer's ranks, and the orchestrator's batches and rollouts."""

from __future__ import annotations

from primeslurm.records.record import Event


class TrainerStarted(Event, frozen=True, tag="start"):
    """A rank's process runs."""

    pid: int | None = None


class CheckpointLoaded(Event, frozen=True, tag="loaded"):
    """A rank holds the newest checkpoint, or (step 0) the model as it is."""

    step: int


class StepTrained(Event, frozen=True, tag="step"):
    """Rank 0 has made an optimizer step."""

    step: int
    loss: float | None = None
    off_policy_kl: float | None = None


class StepSkipped(Event, frozen=True, tag="step_skipped"):
    """The gradient of a step was not finite, so the step left the weights as they were."""

    step: int
    grad_norm: str = ""
    """nan or inf: JSON has no number for either."""


class WeightsPublished(Event, frozen=True, tag="published"):
    """A rank has handed on its part of a policy."""

    version: int
    sent_s: float | None = None
    """Seconds of sending, where engines take weights from the trainer."""


class CheckpointCommitted(Event, frozen=True, tag="committed"):
    """A checkpoint is complete."""

    step: int


class CheckpointSetAside(Event, frozen=True, tag="checkpoint_damaged"):
    """The trainer has renamed a committed checkpoint that is proven to be damaged, and resumes from an older one."""

    step: int
    reason: str = ""
    """What differs from the record. It is also in a file beside the directory."""
    path: str = ""
    """Where the checkpoint is now."""


class TrainerStopped(Event, frozen=True, tag="stop"):
    """A rank ends."""

    step: int | None = None
    reason: str = ""
    """finished, interrupted, or its error."""


class OrchestratorUp(Event, frozen=True, tag="orchestrator_up"):
    """The orchestrator runs."""

    step: int
    """The step whose batch it forms next."""
    ready: int = 0
    """Finished rollout groups that it found."""


class OrchestratorDone(Event, frozen=True, tag="orchestrator_done"):
    """The orchestrator's work is done."""

    step: int


class BatchFormed(Event, frozen=True, tag="batch"):
    """The batch of a step is on record."""

    step: int
    reward: float | None = None
    """Mean of the batch."""
    staleness: float | None = None
    """Largest in the batch, in policy versions."""


class StepReported(Event, frozen=True, tag="step_done"):
    """The orchestrator has heard that a step was trained."""

    step: int
    reward: float | None = None


class RolloutFailed(Event, frozen=True, tag="rollout_failed"):
    """A rollout ended with an error."""

    job: str = ""
    error: str = ""
    environment: str = ""
    """Its label; empty in runs of older releases."""


class TaskGivenUp(Event, frozen=True, tag="task_given_up"):
    """A task is left out: its rollouts kill their worker, or fail again and again, or its prompt is too long."""

    environment: str
    example: int
    """Position in the environment's stream of tasks."""
    reason: str = ""
    task: int | None = None
    """Index in the taskset, where a curriculum or an evaluation has chosen it."""


class NothingKept(Event, frozen=True, tag="nothing_kept"):
    """Every group for a long time was rejected by the algorithm or by filters."""

    rollouts: int
    """Of those groups, since one was kept."""
    reasons: dict[str, int] = {}
    """Groups by what rejected them."""


class ReplicaLost(Event, frozen=True, tag="replica_lost"):
    """The orchestrator does without an inference replica, whose router was given up."""

    router: str
    rollouts: int = 0
    """How many were in flight there."""


class Stalled(Event, frozen=True, tag="stall", omit_defaults=True):
    """Nothing moves any more, and the orchestrator ends for that."""

    suspect: str
    error: str = ""
    """What was seen of it; the last error, where errors are all that comes."""
    seconds: int | None = None
    """For so long neither a token, nor a rollout, nor a policy has come."""


class EnvironmentFails(Event, frozen=True, tag="environment_fails"):
    """Rollouts of an environment do nothing but fail, and the orchestrator ends for that."""

    environment: str
    error: str = ""
    """Type and message of the last failure."""
    failures: int = 0


TrainingEvent = (
    TrainerStarted
    | CheckpointLoaded
    | StepTrained
    | StepSkipped
    | WeightsPublished
    | CheckpointCommitted
    | CheckpointSetAside
    | TrainerStopped
    | OrchestratorUp
    | OrchestratorDone
    | BatchFormed
    | StepReported
    | RolloutFailed
    | TaskGivenUp
    | NothingKept
    | ReplicaLost
    | Stalled
    | EnvironmentFails
)

"""Events of training: trainer ranks, and the orchestrator's batches and rollouts."""

from __future__ import annotations

from primeslurm.records.record import Event


class TrainerStarted(Event, frozen=True, tag="start"):
    """The process of a rank runs."""

    pid: int | None = None


class CheckpointLoaded(Event, frozen=True, tag="loaded"):
    """A rank has loaded the newest checkpoint, or the original model (step 0)."""

    step: int


class WarmedUp(Event, frozen=True, tag="warmed_up"):
    """A rank has compiled for its first step, with a synthetic batch."""

    seconds: float


class StepTrained(Event, frozen=True, tag="step"):
    """Rank 0 has completed an optimizer step."""

    step: int
    loss: float | None = None
    off_policy_kl: float | None = None


class StepSkipped(Event, frozen=True, tag="step_skipped"):
    """The gradient of a step was not finite. The weights did not change."""

    step: int
    grad_norm: str = ""  # nan or inf, as text: JSON has no such numbers


class WeightsPublished(Event, frozen=True, tag="published"):
    """A rank has published its shards of a policy."""

    version: int
    sent_s: float | None = None  # duration of sending, if engines receive weights from the trainer
    connect_s: float | None = None  # part of `sent_s` until all engines had arrived and were connected
    groups: int | None = None  # process groups made so far to send: one more when engines come, go or fail
    size: int | None = None  # bytes of the files that engines read, from rank 0: a whole model, or an adapter
    beside_s: float | None = None  # duration of the part that ran beside the next step


class CheckpointCommitted(Event, frozen=True, tag="committed"):
    """A checkpoint is complete."""

    step: int


class CheckpointSetAside(Event, frozen=True, tag="checkpoint_damaged"):
    """The trainer renamed a committed checkpoint that is damaged, and resumes from an older one."""

    step: int
    reason: str = ""  # what differs from the record; a file beside the checkpoint has it, too
    path: str = ""  # its new path


class TrainerStopped(Event, frozen=True, tag="stop"):
    """A rank ends."""

    step: int | None = None
    reason: str = ""  # finished, interrupted, or its error


class OrchestratorUp(Event, frozen=True, tag="orchestrator_up"):
    """The orchestrator runs."""

    step: int  # step of the next batch
    ready: int = 0  # finished rollout groups that it found on disk


class OrchestratorDone(Event, frozen=True, tag="orchestrator_done"):
    """The orchestrator has completed its work."""

    step: int


class BatchFormed(Event, frozen=True, tag="batch"):
    """The batch of a step is recorded."""

    step: int
    reward: float | None = None  # mean of the batch
    staleness: float | None = None  # largest in the batch, in policy versions


class StepReported(Event, frozen=True, tag="step_done"):
    """The trainer has reported a step to the orchestrator."""

    step: int
    reward: float | None = None


class RolloutFailed(Event, frozen=True, tag="rollout_failed"):
    """A rollout ended with an error."""

    job: str = ""
    error: str = ""
    environment: str = ""  # its label


class TaskGivenUp(Event, frozen=True, tag="task_given_up"):
    """A task is skipped from now on: it kills workers, fails repeatedly, or its prompt is too long."""

    environment: str
    example: int  # position in the environment's task order
    reason: str = ""
    task: int | None = None  # index in the taskset, if a curriculum or an evaluation chose the task


class NothingKept(Event, frozen=True, tag="nothing_kept"):
    """The algorithm or filters have rejected every group for a long time."""

    rollouts: int  # rejected rollouts since a group was kept
    reasons: dict[str, int] = {}  # groups by what rejected them


class ReplicaLost(Event, frozen=True, tag="replica_lost"):
    """The orchestrator continues without a replica, whose router was given up."""

    router: str
    rollouts: int = 0  # rollouts in flight there


class Stalled(Event, frozen=True, tag="stall", omit_defaults=True):
    """The run makes no progress. The orchestrator ends."""

    suspect: str
    error: str = ""  # last error, if there are errors
    seconds: int | None = None  # time without a token, a rollout or a policy


class EnvironmentFails(Event, frozen=True, tag="environment_fails"):
    """All rollouts of an environment fail. The orchestrator ends."""

    environment: str
    error: str = ""  # type and message of the last failure
    failures: int = 0

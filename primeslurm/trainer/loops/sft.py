"""The SFT loop. The trainer runs alone, writes its own metrics, and publishes the weights once at the end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from primeslurm.recipe import Recipe
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.records.attempt import first_step_metrics
from primeslurm.records.events.training import (
    CheckpointLoaded,
    StepSkipped,
    StepTrained,
    TrainerStopped,
    WeightsPublished,
)
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import MetricsLog
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.data import sft_data, token_files
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.batch import Batch

log = logging.getLogger(__name__)


@dataclass
class SftTask:
    """The SFT training loop of one rank."""

    recipe: Recipe
    run_dir: Path
    attempt: int
    train_step: TrainStep
    publisher: Publisher
    saver: Checkpoints
    world: World
    examples: sft_data.ExampleList
    journal: Journal

    def __post_init__(self) -> None:
        self._limits = PhaseLimits.of(self.recipe)
        self._timer = PhaseTimer(self.journal, self.world.is_main, self._limits)

    def run(self) -> int:
        """Train until max_steps or an interrupt. Return the exit code."""
        self._timer.step = step = self.saver.restore(self.train_step)
        for damaged in self.saver.damaged:
            self.journal.write(damaged)
        self.journal.write(CheckpointLoaded(step))
        metrics = MetricsLog(self.run_dir, step, **self.recipe.metrics_options()) if self.world.is_main else None
        interrupted = False
        while step < self.recipe.max_steps and not interrupted:
            step += 1
            self._timer.step = step
            values = self.train_step.train(self._batch(step), self._timer) | self._timer.take(self.world.size)
            if metrics is not None:
                if self._timer.steps_done == 1:
                    values |= first_step_metrics(self.run_dir / "attempts" / str(self.attempt))
                self.saver.require_owned()
                metrics.write(step, values)
                self.journal.write(StepTrained(step, values["loss"]))
                if values["skipped"]:
                    self.journal.write(StepSkipped(step, str(values["grad_norm"])))
                log.info("step %d: %s", step, "  ".join(f"{name} {value:.4g}" for name, value in values.items()))
            self.saver.after(step, self.train_step, self._timer)
            if self._timer.steps_done == 1:
                self.world.tighten(self._limits.collective_s, self.train_step.policy.dims)
            interrupted = bool(self.world.decide(int(self.world.interrupt.requested())))
        if metrics is not None:
            metrics.close()
        self.saver.finish(step, self.train_step, self._timer)
        finished = step == self.recipe.max_steps
        if finished:
            self._publish(step)
            if self.world.is_main:
                token_files.remove(self.run_dir)
        self.journal.write(TrainerStopped(step, "finished" if finished else "interrupted"))
        return 0 if finished else exit_codes.CHECKPOINTED

    def _batch(self, step: int) -> Batch:
        assert self.recipe.sft is not None
        policy = self.train_step.policy
        return sft_data.batch(
            self.examples,
            step,
            self.recipe.sft.batch_size,
            self.recipe.seq_len,
            self.recipe.seed,
            policy.dp_rank,
            policy.dp_world,
            self.recipe.trainer.joined_rows(self.recipe.seq_len),
        )

    def _publish(self, step: int) -> None:
        if self.publisher.is_sound(step):
            return
        with self._timer.phase("publish"):
            path = self.publisher.publish(step)
            self.publisher.flush(step)
        self.journal.write(WeightsPublished(step))
        log.info("published %s", path)

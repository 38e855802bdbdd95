"""The SFT loop. The trainer runs alone, writes its own metrics, and publishes the weights once at the end."""

from __future__ import annotations

import logging
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
from primeslurm.trainer.weight_transfer.filesystem import Publisher
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.batch import Batch

log = logging.getLogger(__name__)


class SftTask:
    """The SFT training loop of one rank."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        attempt: int,
        train_step: TrainStep,
        publisher: Publisher,
        saver: Checkpoints,
        world: World,
        examples: sft_data.ExampleList,
        journal: Journal,
    ) -> None:
        self._recipe = recipe
        self._run_dir = run_dir
        self._attempt_dir = run_dir / "attempts" / str(attempt)
        self._train_step = train_step
        self._publisher = publisher
        self._saver = saver
        self._world = world
        self._examples = examples
        self._journal = journal
        self._limits = PhaseLimits.of(recipe)
        self._timer = PhaseTimer(journal, world.is_main, self._limits)

    def run(self) -> int:
        """Train until max_steps or an interrupt. Return the exit code."""
        self._timer.step = step = self._saver.restore(self._train_step)
        for damaged in self._saver.damaged:
            self._journal.write(damaged)
        self._journal.write(CheckpointLoaded(step))
        metrics = MetricsLog(self._run_dir, step, **self._recipe.metrics_options()) if self._world.is_main else None
        interrupted = False
        while step < self._recipe.max_steps and not interrupted:
            step += 1
            self._timer.step = step
            values = self._train_step.train(self._batch(step), self._timer) | self._timer.take(self._world.size)
            if metrics is not None:
                if self._timer.steps_done == 1:
                    values |= first_step_metrics(self._attempt_dir)
                self._saver.require_owned()
                metrics.write(step, values)
                self._journal.write(StepTrained(step, values["loss"]))
                if values["skipped"]:
                    self._journal.write(StepSkipped(step, str(values["grad_norm"])))
                log.info("step %d: %s", step, "  ".join(f"{name} {value:.4g}" for name, value in values.items()))
            self._saver.after(step, self._train_step, self._timer)
            if self._timer.steps_done == 1:
                self._world.tighten(self._limits.collective_s, self._train_step.policy.dims)
            interrupted = bool(self._world.decide(int(self._world.interrupt.requested())))
        if metrics is not None:
            metrics.close()
        self._saver.finish(step, self._train_step, self._timer)
        finished = step == self._recipe.max_steps
        if finished:
            self._publish(step)
            if self._world.is_main:
                token_files.remove(self._run_dir)
        self._journal.write(TrainerStopped(step, "finished" if finished else "interrupted"))
        return 0 if finished else exit_codes.CHECKPOINTED

    def _batch(self, step: int) -> Batch:
        assert self._recipe.sft is not None
        policy = self._train_step.policy
        return sft_data.batch(
            self._examples,
            step,
            self._recipe.sft.batch_size,
            self._recipe.seq_len,
            self._recipe.seed,
            policy.dp_rank,
            policy.dp_world,
        )

    def _publish(self, step: int) -> None:
        if self._publisher.is_sound(step):
            return
        with self._timer.phase("publish"):
            path = self._publisher.publish(step)
            self._publisher.flush(step)
        self._journal.write(WeightsPublished(step))
        log.info("published %s", path)

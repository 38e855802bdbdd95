"""The RL loop: ask for a batch, train, transfer the policy, report, checkpoint. Step s makes policy version s."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Protocol

from primeslurm.recipe import Recipe
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.records.events.training import (
    CheckpointLoaded,
    StepSkipped,
    StepTrained,
    TrainerStopped,
    WarmedUp,
    WeightsPublished,
)
from primeslurm.records.heartbeats import liveness
from primeslurm.records.journal import Journal
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.loops.synthetic_batch import synthetic_batch
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.background import HEARTBEAT_S
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.batch import Batch, RankShard
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink, TransferWanted

log = logging.getLogger(__name__)


class _Fetch:
    """A request for one step's batch, which a thread waits for."""

    def __init__(self, link: TrainerLink, step: int, shard: RankShard, timeout_s: float) -> None:
        self.step = step
        self.batch: Batch | None = None
        self.transfer_wanted = False
        self.ended = futures.Future[None]()
        self._link = link
        self._shard = shard
        self._timeout_s = timeout_s
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Cancel the request for the batch. If the batch is already arriving, wait for all of it."""
        self.cancel()
        while self._link.receiving and self._thread.is_alive():
            liveness().heartbeat()
            self._thread.join(HEARTBEAT_S)

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> None:
        try:
            self.batch = self._link.get_batch(
                self.step, self._shard, self._timeout_s, self._cancelled.is_set, ahead=True
            )
        except TransferWanted:
            self.transfer_wanted = True
        except LinkError as error:  # the training loop asks again
            log.warning("cannot prefetch the batch of step %d: %s", self.step, error)
        finally:
            self._link.close()
            self.ended.set_result(None)


class Prefetch:
    """Prefetches this rank's shard of one batch at a time, within `timeout_s` [s], on a connection beside `link`."""

    def __init__(self, link: TrainerLink, shard: RankShard, timeout_s: float) -> None:
        self._link = link
        self._shard = shard
        self._timeout_s = timeout_s
        self._fetch: _Fetch | None = None

    def begin(self, step: int) -> None:
        """Start to fetch the batch of `step`, and cancel any other fetch."""
        self.cancel()
        self._fetch = _Fetch(self._link.beside(), step, self._shard, self._timeout_s)

    def take(self, step: int) -> Batch | None:
        """Return the batch of `step`, or None if it was not prefetched. Raises TransferWanted as `get_batch` does."""
        fetch, self._fetch = self._fetch, None
        if fetch is None or fetch.step != step:
            return None
        fetch.end()
        if fetch.transfer_wanted:
            raise TransferWanted
        return fetch.batch

    def cancel(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()
            self._fetch = None

    def wait(self, other: futures.Future[None], timeout_s: float) -> None:
        """Wait until the batch is here, or `other` is done, but at most `timeout_s`. Return at once without a fetch."""
        if self._fetch is not None:
            futures.wait((self._fetch.ended, other), timeout_s, futures.FIRST_COMPLETED)


class Choice(enum.IntEnum):
    """Rank 0's decision before each step. All ranks follow it, so that they run the same collectives."""

    TRAIN = 0
    FINISHED = 1
    INTERRUPTED = 2
    FAILED = 3
    TRANSFER = 4  # Complete the transfer of the current policy to engines. They cannot generate a batch before.


class WeightTransfer(Protocol):
    """A transport for weight updates, by `weights.transport`. All methods are collectives and raise RankError."""

    publisher: Publisher

    def resume(self, version: int) -> None:
        """Offer engines the version of the loaded checkpoint. Version 0 is the model that they start with."""

    def transfer(self, version: int, published: Callable[[WeightsPublished], None]) -> None:
        """Update the engines to the version that was just trained, and call `published` with the event to record.

        The policy may change after this returns. The rest runs in a thread, at most until the next call.
        """

    def pending(self) -> futures.Future[None] | None:
        """Return the last `transfer`; None if it is complete. Not a collective."""

    def finish(self) -> None:
        """Wait until the last `transfer` is complete."""

    def repeat(self, version: int) -> None:
        """Complete the transfer of `version`, also to engines that started in the meantime."""

    def flush(self, version: int) -> None:
        """Flush the files of `version`, whose transfer is complete. Must precede the commit of that step."""


@dataclass
class RlTask:
    """The RL training loop of one rank."""

    recipe: Recipe
    train_step: TrainStep
    transfer: WeightTransfer
    saver: Checkpoints
    world: World
    link: TrainerLink
    journal: Journal

    def __post_init__(self) -> None:
        policy = self.train_step.policy
        self._shard = RankShard(policy.dp_rank, policy.dp_world, policy.cp_rank, policy.cp_world)
        self._prefetch = Prefetch(self.link, self._shard, self.recipe.trainer.batch_wait_s)
        self._limits = PhaseLimits.of(self.recipe)
        self._timer = PhaseTimer(self.journal, self.world.is_main, self._limits)

    def run(self) -> int:
        """Train until max_steps, until the orchestrator stops the run, or until an interrupt. Return the exit code."""
        step = self._resume()
        choice = Choice.FINISHED
        while step < self.recipe.max_steps:
            with self._timer.phase("wait"):
                choice, batch = self._next(step + 1)
            if choice is Choice.TRANSFER:
                with self._timer.phase("publish"):
                    self.transfer.repeat(step)
                continue
            if batch is None:
                break
            step += 1
            self._step(step, batch)
        self._prefetch.cancel()
        self._flush(step)
        self.saver.finish(step, self.train_step, self._timer)
        interrupted = choice is Choice.INTERRUPTED
        self.journal.write(TrainerStopped(step, "interrupted" if interrupted else "finished"))
        return exit_codes.CHECKPOINTED if interrupted else 0

    def _resume(self) -> int:
        self._timer.step = step = self.saver.restore(self.train_step)
        for damaged in self.saver.damaged:
            self.journal.write(damaged)
        self.journal.write(CheckpointLoaded(step))
        with self._timer.phase("publish"):
            self.transfer.resume(step)
        self._warm_up(step)
        if step:
            with self._timer.phase("publish"):
                self.transfer.repeat(step)
        return step

    def _warm_up(self, step: int) -> None:
        """Compile for the first step, `step`, while engines start and before this rank waits for them."""
        if not self.train_step.compiles or step >= self.recipe.max_steps:
            return
        if self.world.decide(int(self.world.interrupt.requested())):
            return
        with self._timer.phase("warm_up"):
            self.train_step.warm_up(synthetic_batch(self.recipe, self.train_step.policy))
        self.journal.write(WarmedUp(round(self._timer.seconds("warm_up"), 1)))

    def _next(self, step: int) -> tuple[Choice, Batch | None]:
        """Get this rank's rows of the batch. Rank 0 asks the orchestrator first; the others follow its choice."""
        choice, batch, failure = Choice.TRAIN, None, None
        if self.world.is_main:
            try:
                choice, batch = self._ask(step)
            except TransferWanted:
                choice = Choice.TRANSFER
            except LinkError as error:
                choice, failure = Choice.FAILED, error
        choice = Choice(self.world.decide(choice))
        if choice is Choice.FAILED:
            raise failure or LinkError(f"rank 0 got no batch for step {step}")
        if choice is Choice.TRAIN and not self.world.is_main:
            batch = self._fetch(step)
            if batch is None:
                raise LinkError(f"rank 0 got a batch for step {step}, but this rank got none")
        return choice, batch

    def _ask(self, step: int) -> tuple[Choice, Batch | None]:
        self.saver.require_owned()
        batch = self._fetch(step)
        if batch is not None:
            return Choice.TRAIN, batch
        return (Choice.INTERRUPTED if self.world.interrupt.requested() else Choice.FINISHED), None

    def _fetch(self, step: int) -> Batch | None:
        # Only rank 0 may give up on an interrupt: the others fetch a batch that rank 0 already has.
        def interrupted() -> bool:
            liveness().heartbeat()
            return self.world.is_main and self.world.interrupt.requested()

        pending = self.transfer.pending() if self.world.is_main else None
        if pending is not None and not interrupted():
            self._prefetch.wait(pending, HEARTBEAT_S)
        if not interrupted() and (batch := self._prefetched(step)) is not None:
            return batch
        if self.world.is_main and self.transfer.pending() and not interrupted():
            raise TransferWanted  # the batch may need rollouts of this policy, and a full disk may delay it for hours
        timeout_s = self.recipe.trainer.batch_wait_s
        return self.link.get_batch(step, self._shard, timeout_s, interrupted)

    def _prefetched(self, step: int) -> Batch | None:
        try:
            return self._prefetch.take(step)
        except TransferWanted:
            if self.world.is_main:
                raise
            return None

    def _step(self, step: int, batch: Batch) -> None:
        self._timer.step = step
        if step < self.recipe.max_steps:
            self._prefetch.begin(step + 1)
        metrics = self.train_step.train(batch, self._timer)
        with self._timer.phase("publish"):
            self.transfer.transfer(step, self.journal.write)
        # A step is reported before it is saved, so its checkpoint seconds are those of the previous save.
        metrics |= self._timer.take(self.world.size)
        if self.world.is_main:
            self.link.step_done(step, metrics)
            if metrics["skipped"]:
                self.journal.write(StepSkipped(step, str(metrics["grad_norm"])))
            self.journal.write(StepTrained(step, metrics["loss"], metrics["off_policy_kl"]))
            log.info("step %d: %s", step, "  ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
        if self.recipe.commits(step):
            self._flush(step)
        self.saver.after(step, self.train_step, self._timer)
        # The first step compiles kernels and creates communicators. From now on a long wait means a hang.
        if self._timer.steps_done == 1:
            self.world.tighten(self._limits.collective_s, self.train_step.policy.dims)

    def _flush(self, version: int) -> None:
        with self._timer.phase("publish"):
            self.transfer.finish()
        with self._timer.phase("checkpoint"):
            self.transfer.flush(version)

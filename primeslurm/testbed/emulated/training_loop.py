"""The training loop of the emulated rank 0: the real protocol with the orchestrator, without a model.

It publishes policies and commits checkpoints of a few bytes, in the real formats.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from primeslurm.base import durable, files, logs
from primeslurm.base.durable import retry_until_written
from primeslurm.recipe import Recipe
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.records.attempt import require_newest
from primeslurm.records.events.training import (
    CheckpointCommitted,
    CheckpointLoaded,
    CheckpointSetAside,
    StepTrained,
    TrainerStopped,
    WeightsPublished,
)
from primeslurm.records.heartbeats import liveness
from primeslurm.records.journal import Journal
from primeslurm.records.state import TrainerState
from primeslurm.testbed.emulated.rank_group import LostRankError, Ranks
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.batch import Batch, RankShard
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink, TransferWanted
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.weight_transfer import filesystem

log = logging.getLogger("primeslurm.testbed.emulated.trainer")

# Shortest duration of a step [s].
STEP_S = 0.5
TOKENS_PER_S_AND_RANK = 500.0


class EmulatedTrainer:
    """The loop of rank 0, for `world` ranks."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, attempt: int, link: TrainerLink, ranks: Ranks, world: int
    ) -> None:
        self._recipe = recipe
        self._run_dir = run_dir
        self._attempt = attempt
        self._link = link
        self._ranks = ranks
        self._world = world
        self._limits = PhaseLimits.of(recipe)
        self._dp_world = max(1, world // recipe.trainer.parallelism.cp)
        self._journal = Journal(run_dir / "attempts" / str(attempt), "trainer-rank-0")
        self._journal.note_storage_faults()
        self._saved = 0
        self._announced = 0

    def run(self) -> int:
        """Train until `max_steps`, the orchestrator's stop or an interrupt, and return the exit code.

        Raises:
            LinkError: the orchestrator does not answer.
            OSError: the disk failed. Committed checkpoints are intact.
        """
        liveness().enter("load", limit_s=self._limits.long_s)
        self._ranks.join()
        step, done = self._resume(), False
        while step < self._recipe.max_steps and not done:
            done = not self._step(step + 1)
            step += not done
        if step > self._saved:
            self._commit(step)
        interrupted = done and self._ranks.interrupted()
        self._journal.write(TrainerStopped(step, "interrupted" if interrupted else "finished"))
        return exit_codes.CHECKPOINTED if interrupted else 0

    def _resume(self) -> int:
        self._saved = step = retry_until_written(self._newest_whole) or 0
        self._journal.write(CheckpointLoaded(step))
        if step:
            retry_until_written(lambda: self._link.committed(step))
            self._transfer(step)
        else:
            self._announced = retry_until_written(lambda: self._link.announce(0, self._recipe.model.path))
        for newer in filesystem.published(self._run_dir):
            if newer > self._announced:
                retry_until_written(partial(files.remove_tree, filesystem.version_dir(self._run_dir, newer)))
        retry_until_written(lambda: filesystem.prune_behind(self._run_dir, self._recipe.weights.keep, self._announced))
        return step

    def _newest_whole(self) -> int | None:
        def note(step: int, why: str, path: Path) -> None:
            self._journal.write(CheckpointSetAside(step, why, str(path)))

        return checkpoints.set_damaged_aside(self._run_dir, self._attempt, note)

    def _step(self, step: int) -> bool:
        """Train one step. Return False if there is nothing left to train."""
        self._journal.state(TrainerState(step - 1, "wait"))
        liveness().enter("wait", step - 1, self._limits.wait_s)
        batch = self._batch(step)
        if batch is None:
            return False
        self._journal.state(TrainerState(step, "train"))
        liveness().enter("train", step, self._limits.step_s)
        self._ranks.meet()
        spent = STEP_S + batch.info.loss_tokens / (TOKENS_PER_S_AND_RANK * self._world)
        time.sleep(spent)
        liveness().enter("publish", step, self._limits.publish_s)
        self._transfer(step)
        self._link.step_done(step, {"loss": 1.0 / step, "loss_tokens": batch.info.loss_tokens, "seconds/train": spent})
        self._journal.write(StepTrained(step))
        if self._recipe.commits(step):
            self._commit(step)
        return True

    def _batch(self, step: int) -> Batch | None:
        timeout_s = self._recipe.trainer.batch_wait_s
        while True:
            try:
                return self._link.get_batch(step, RankShard(0, self._dp_world), timeout_s, self._ranks.interrupted)
            except TransferWanted:
                self._send(step - 1)

    def _transfer(self, version: int) -> None:
        if self._recipe.weights.transport != "nccl":
            if version > self._announced:
                path = retry_until_written(lambda: self._publish(version))
                self._announced = retry_until_written(lambda: self._link.announce(version, str(path)))
        else:
            retry_until_written(lambda: self._link.announce(version, ""))
            self._send(version)
            if version == self._recipe.max_steps:
                retry_until_written(lambda: self._publish(version))

    def _send(self, version: int) -> None:
        """Take part in the weight-update sessions, without sending tensors."""
        done, deadline = "", time.monotonic() + self._recipe.weights.load_s
        while session := self._link.offer_transfer(version, "emulated", self._world, done, deadline):
            done = session.id

    def _publish(self, version: int) -> Path:
        final = filesystem.version_dir(self._run_dir, version)
        partial = final.with_name(f".{final.name}.partial")
        for old in (partial, final):
            files.remove_tree(old)
        files.make_directory(partial)
        save_file({"emulated.weight": np.full(64, version, np.float32)}, partial / "model.safetensors")
        filesystem.complete(partial, version, "float32")
        files.rename(partial, final)
        filesystem.prune_behind(self._run_dir, self._recipe.weights.keep, version)
        self._journal.write(WeightsPublished(version))
        return final

    def _commit(self, step: int) -> None:
        retry_until_written(lambda: self._save(step))
        needed = retry_until_written(lambda: self._link.committed(step))
        retry_until_written(lambda: checkpoints.prune(self._run_dir, self._recipe.checkpoint.keep, needed))
        self._saved = step
        self._journal.write(CheckpointCommitted(step))

    def _save(self, step: int) -> None:
        self._journal.state(TrainerState(step, "checkpoint"))
        liveness().enter("checkpoint", step, self._limits.long_s)
        require_newest(self._run_dir, self._attempt)
        directory = checkpoints.step_dir(self._run_dir, step)
        checkpoints.clear(directory)
        durable.make_directory(directory / "trainer")
        self._journal.sync()
        if files.is_dir(weights := filesystem.version_dir(self._run_dir, step)):
            durable.sync_tree(weights)
        files.write_atomic(directory / "trainer" / "emulated.bin", step.to_bytes(8, "little"))
        self._link.save(step, str(directory))
        checkpoints.commit(directory, step, self._attempt)


def train(argv: list[str] | None, ranks: Ranks) -> int:
    """Run rank 0, and return its exit code, which becomes that of all ranks."""
    parser = argparse.ArgumentParser(prog="primeslurm.testbed.emulated.trainer", allow_abbrev=False)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--orchestrator", required=True)
    options, _ = parser.parse_known_args(argv)
    logs.configure("%(asctime)s trainer 0 %(levelname)s %(message)s")
    recipe = Recipe.model_validate_json(files.read_bytes(options.recipe))
    world = int(os.environ["WORLD_SIZE"])
    link = TrainerLink(options.orchestrator, on_wait=liveness().heartbeat)
    try:
        code = EmulatedTrainer(recipe, options.run_dir, options.attempt, link, ranks, world).run()
    except (LostRankError, LinkError, OSError) as error:
        log.error("%s: %s", type(error).__name__, error)
        code = 1
    ranks.close(code)
    return code

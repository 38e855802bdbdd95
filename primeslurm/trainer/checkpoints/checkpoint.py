"""The trainer's checkpoints in torch's DCP format. Trainer and orchestrator commit them together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful

from primeslurm.base import files
from primeslurm.base.durable import RETRY_S, retry_until_written
from primeslurm.recipe.sections.trainer import Checkpoint
from primeslurm.records import metrics
from primeslurm.records.attempt import require_newest
from primeslurm.records.events.training import CheckpointCommitted, CheckpointSetAside
from primeslurm.records.journal import Journal
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.checkpoints.local_copies import LocalCopies
from primeslurm.trainer.checkpoints.shards import (
    ByteCounter,
    DamagedShardError,
    ShardReader,
    ShardWriter,
    wait_with_heartbeats,
)
from primeslurm.trainer.checkpoints.staging import copies_fit
from primeslurm.trainer.distributed.cpu_affinity import io_threads
from primeslurm.trainer.distributed.disk_space import MAX_ATTEMPTS, is_disk_full, is_unreachable, retry_while_full
from primeslurm.trainer.distributed.world import RankError, World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink
from primeslurm.wire.names import LOCAL_CHECKPOINTS
from primeslurm.wire.stored import checkpoints

log = logging.getLogger(__name__)
# Name suffixes of optimizer moments
_MOMENTS = (".exp_avg", ".exp_avg_sq", ".momentum_buffer")
# Timeout of the checkpoint collectives. Heartbeats detect hung ranks much earlier, so this is only a backstop.
_BACKSTOP = timedelta(days=1)


@dataclass(frozen=True)
class _PendingWrite:
    """A checkpoint that is being written in the background."""

    step: int
    start_time: float
    counter: ByteCounter
    done: Future[None]  # on rank 0 this includes writing COMMITTED, after every rank's files


class Checkpoints:
    """Saves, commits and restores the checkpoints of one run. All methods are collectives.

    In asynchronous mode, a thread writes a copy of the state in host memory while training continues. `link` is None
    for SFT. While the disk is full, saving is tried again every `pause_s` [s].
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        config: Checkpoint,
        world: World,
        link: TrainerLink | None,
        pause_s: float = RETRY_S,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._config = config
        self._world = world
        self._link = link
        self._pause_s = pause_s
        self._saved_step = 0
        self._lost_in_a_row = 0  # consecutive checkpoints that were lost because the file system was unreachable
        self._pending: _PendingWrite | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # The writer thread needs its own process group: its collectives must not mix with those of the training loop.
        # A rank that has written its shards waits here for slower ranks. These send heartbeats while they move bytes,
        # so no shorter timeout is needed.
        self._group = dist.new_group(backend="gloo", timeout=max(_BACKSTOP, timedelta(seconds=world.timeout_s)))
        pinned = world.device.type == "cuda"
        self._staging = StagingOptions(pinned, False, False, pinned)
        self._stager: DefaultStager | None = None
        self.damaged: list[CheckpointSetAside] = []  # checkpoints that `restore` set aside, on rank 0
        self._asynchronous = config.asynchronous if pinned else bool(config.asynchronous)
        """True if a thread writes checkpoints. None: the first save decides by the free host memory."""
        self._copies: LocalCopies | None = None
        if config.local and (directory := os.environ.get(LOCAL_CHECKPOINTS)):
            self._copies = LocalCopies(Path(directory), world, _BACKSTOP)

    def require_owned(self) -> None:
        """Raise TakenOverError if a newer attempt owns the run. This attempt must not write anything then."""
        require_newest(self._run_dir, self._attempt)

    def after(self, step: int, train_step: TrainStep, timer: PhaseTimer) -> None:
        """Commit a finished background write, and save `step` if the interval is due. A full disk pauses the call.

        Raises RankError if the disk or the orchestrator failed. Earlier checkpoints are intact then.
        """
        due = step % self._config.interval == 0
        if self._pending is not None and self._world.decide(int(self._pending.done.done())):
            # A background write that failed because the disk was full is replaced by a checkpoint of this step.
            due = not self._commit_or_discard(timer) or due
        if due:
            self._save(step, train_step, timer)

    def finish(self, step: int, train_step: TrainStep, timer: PhaseTimer) -> None:
        """Save `step` unless it is saved, and wait until it is committed. No call may follow. Raises as `after`."""
        if self._copies is not None:
            self._copies.close()  # the run does not restart from its last checkpoint
            self._copies = None
        if step > self._saved_step:
            self._save(step, train_step, timer)
        while not self._commit_or_discard(timer):
            self._save(step, train_step, timer)
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()

    def restore(self, train_step: TrainStep) -> int:
        """Load the newest undamaged checkpoint and return its step, or 0 if there is none.

        A checkpoint that is proven to be damaged is renamed to `*.damaged-<attempt>`. Raises RankError if the
        orchestrator failed, a newer attempt owns the run, or a node does not see a committed checkpoint.
        """
        self._on_main(self.require_owned, "restoring a checkpoint")
        partly_loaded = False
        while step := self._newest_undamaged():
            damage = self._load(step, train_step)
            if not damage:
                # The process that committed this checkpoint may have been killed before it announced it.
                self._on_main(lambda: self._announce(step), f"resuming at step {step}")
                self._saved_step = step
                return step
            partly_loaded = True
            # Renamed, so that all processes agree on the newest checkpoint.
            self._on_main(partial(self._set_aside, step, damage), f"setting the checkpoint of step {step} aside")
        if partly_loaded:
            # Some weights and moments are already overwritten, so this process cannot start from step 0.
            raise RankError("the damaged checkpoint was loaded in part, and there is no other one: restart the trainer")
        return 0

    def _newest_undamaged(self) -> int:
        """Rename checkpoints that are damaged even without reading shards. Return the newest other step, or 0."""
        steps: list[int] = []

        def look() -> None:
            steps.append(checkpoints.set_damaged_aside(self._run_dir, self._attempt, self._note_damage) or 0)

        self._on_main(look, "looking for the newest checkpoint")
        return self._world.decide(steps[0] if steps else 0)

    def _set_aside(self, step: int, reasons: list[str]) -> None:
        path = checkpoints.set_aside(self._run_dir, step, self._attempt, reasons)
        self._note_damage(step, "; ".join(reasons), path)

    def _note_damage(self, step: int, reason: str, path: Path) -> None:
        self.damaged.append(CheckpointSetAside(step, reason, str(path)))

    def _load(self, step: int, train_step: TrainStep) -> list[str]:
        """Load a checkpoint. Return descriptions of its damage. Raises RankError if it cannot be read."""
        counter = ByteCounter()
        directory = checkpoints.step_dir(self._run_dir, step) / "trainer"
        copies: dict[str, Path] = {}
        if self._copies is not None:
            copies = self._copies.recover(step, self._world.share(checkpoints.shard_sizes(self._run_dir, step)))
        reader = ShardReader(directory, counter, io_threads(), copies)
        try:
            dcp.load(_state(train_step), storage_reader=reader, process_group=self._group)
        except CheckpointException as error:
            failures = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
            damage = [str(each) for each in failures.values() if isinstance(each, DamagedShardError)]
            if not damage:
                texts = "; ".join(f"rank {rank}: {each!r}" for rank, each in failures.items())
                raise RankError(f"reading the checkpoint of step {step} failed: {texts}") from error
            return sorted(set(damage))
        if self._copies is not None:
            percent = 100 * reader.bytes_from_copies / max(1, counter.bytes)
            log.info("step %d: read %.1f %% of %.3f GB from local copies", step, percent, counter.bytes / 1e9)
        return []

    def _save(self, step: int, train_step: TrainStep, timer: PhaseTimer) -> None:
        self._commit_or_discard(timer)  # if a full disk discarded the step before, this one is saved instead
        directory = checkpoints.step_dir(self._run_dir, step)

        def save() -> None:
            self._begin_save(step, train_step, timer)

        retry_while_full(self._world, self._run_dir, save, directory, pause_s=self._pause_s)

    def _begin_save(self, step: int, train_step: TrainStep, timer: PhaseTimer) -> None:
        directory = checkpoints.step_dir(self._run_dir, step)
        start_time = time.monotonic()
        with timer.phase("snapshot"):
            self._on_main(lambda: self._begin(directory, step, timer.journal), f"checkpoint of step {step}")
            state = {name: stateful.state_dict() for name, stateful in _state(train_step).items()}
            if self._asynchronous is None:
                self._asynchronous = copies_fit(self._world, state)
            if self._asynchronous and self._stager is None:
                self._stager = DefaultStager(self._staging)
            counter = ByteCounter()
            rounded = _MOMENTS if self._config.moments == "bfloat16" else ()
            copies = self._copies.begin(step) if self._copies else None
            writer = ShardWriter(directory / "trainer", counter, io_threads(), rounded, copies)
            options: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
            write: Callable[[], object]
            if self._stager is None:
                write = partial(dcp.save, state, **options)
            else:
                write = cast(Future[Any], dcp.async_save(state, **options, async_stager=self._stager)).result
        done = self._thread.submit(self._write, write, writer, directory, step)
        self._pending = _PendingWrite(step, start_time, counter, done)
        self._saved_step = step
        # Without a copy in host memory, the thread reads the live weights, so training waits for it.
        if self._stager is None:
            self._commit_pending(timer)

    def _begin(self, directory: Path, step: int, journal: Journal) -> None:
        self.require_owned()
        checkpoints.clear(directory)
        journal.sync()
        # The orchestrator saves first, while its state is still that of `step`. It also flushes its records.
        if self._link is not None:
            self._link.save(step, str(directory))
        else:
            metrics.sync(self._run_dir)

    def _write(self, write: Callable[[], object], writer: ShardWriter, directory: Path, step: int) -> None:
        write()
        if self._world.is_main:
            self.require_owned()
            checkpoints.commit(directory, step, self._attempt, writer.files)

    def _commit_or_discard(self, timer: PhaseTimer) -> bool:
        """Commit the pending write. If the disk was full or unreachable, delete its files and return False.

        Raises RankError for any other failure, and if the disk was unreachable MAX_ATTEMPTS times in a row.
        """
        pending = self._pending
        try:
            self._commit_pending(timer)
        except RankError as error:
            full = is_disk_full(self._world, self._run_dir, error)
            self._lost_in_a_row += not full
            if pending is None or not (
                full or (is_unreachable(self._world, error) and self._lost_in_a_row < MAX_ATTEMPTS)
            ):
                raise
            log.warning("the checkpoint of step %d was not saved: %s", pending.step, error)
            if self._world.is_main:
                files.remove_tree(checkpoints.step_dir(self._run_dir, pending.step), ignore_errors=True)
            return False
        self._lost_in_a_row = 0
        return True

    def _commit_pending(self, timer: PhaseTimer) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        doing = f"checkpoint of step {pending.step}"
        with timer.phase("checkpoint"):
            wait_with_heartbeats([pending.done], pending.counter)
            self._world.agree(_failure(pending.done), doing)
            self._on_main(lambda: self._announce(pending.step), doing)
            if self._copies is not None:
                self._copies.replicate(pending.step)
        timer.took("checkpoint", time.monotonic() - pending.start_time)
        timer.journal.write(CheckpointCommitted(pending.step))

    def _announce(self, step: int) -> None:
        link, keep = self._link, self._config.keep
        needed = retry_until_written(lambda: link.committed(step)) if link is not None else []
        retry_until_written(lambda: checkpoints.prune(self._run_dir, keep, needed))

    def _on_main(self, action: Any, doing: str) -> None:
        failure: Exception | None = None
        if self._world.is_main:
            try:
                action()
            except (OSError, LinkError) as error:
                failure = error
        self._world.agree(failure, doing)


class _TrainedState:
    """The part of a model that a checkpoint stores: buffers and trained parameters. Frozen ones stay as loaded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        state = self._model.state_dict(keep_vars=True)
        return {n: t.detach() for n, t in state.items() if t.requires_grad or not isinstance(t, torch.nn.Parameter)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state, strict=False)  # DCP has already checked that no tensor is missing


def _state(train_step: TrainStep) -> dict[str, Stateful]:
    state: dict[str, Stateful] = {
        "model": _TrainedState(train_step.policy.model),
        "optimizer": train_step.optimizer,
        "scheduler": train_step.scheduler,
    }
    if (drafts := train_step.draft_training) is not None:
        state["draft_layer"] = _TrainedState(drafts.layer.model)
        state["draft_optimizer"], state["draft_scheduler"] = drafts.optimizer, drafts.scheduler
    return state


def _failure(done: Future[None]) -> OSError | None:
    try:
        done.result()
    except (CheckpointException, OSError) as error:  # CheckpointException derives from BaseException
        return OSError(str(error))
    return None

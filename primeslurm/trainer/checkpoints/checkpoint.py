"""Checkpoints: DCP directories that any number of ranks can load, committed together with the orchestrator."""

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
from primeslurm.records.heartbeats import liveness
from primeslurm.records.journal import Journal
from primeslurm.trainer.checkpoints.local_copies import LocalCopies
from primeslurm.trainer.checkpoints.shards import (
    DamagedShardError,
    Moved,
    ShardReader,
    ShardWriter,
    threads_of_a_rank,
    wait_with_heartbeats,
)
from primeslurm.trainer.checkpoints.staging import copies_fit
from primeslurm.trainer.checkpoints.state_planner import StatePlanner
from primeslurm.trainer.distributed.space import MOST_TRIES, for_want_of_space, is_away, waiting_for_space
from primeslurm.trainer.distributed.world import RankError, World
from primeslurm.trainer.loops.phase_timer import PhaseTimer
from primeslurm.trainer.loops.step import Learner
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink
from primeslurm.wire.names import LOCAL_CHECKPOINTS
from primeslurm.wire.stored import checkpoints

log = logging.getLogger(__name__)
_MOMENTS = (".exp_avg", ".exp_avg_sq", ".momentum_buffer")
"""How names of optimizer moments end."""
_BACKSTOP = timedelta(days=1)
"""Of collectives that wait for terabytes. Long before, who hangs is found by its silence, and who dies at once."""


@dataclass(frozen=True)
class _Writing:
    """A checkpoint on its way to the disk."""

    step: int
    began: float
    moved: Moved
    done: Future[None]
    """On rank 0 it includes COMMITTED, which waits for every rank's files."""


class Checkpoints:
    """Saves, commits and restores one run's checkpoints. All ranks call each method together.

    If asynchronous, a checkpoint is copied to host memory, and training goes on while a thread writes the copy. One is
    written at a time: the next one waits.

    Args:
        link: to the orchestrator, which adds its part to each checkpoint; None for a task without one.
        pause_s: between two tries to save where there is no space.
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
        self._saved = 0
        self._lost = 0
        """Checkpoints in a row that were lost because the file system was away."""
        self._writing: _Writing | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # A group of its own: the thread's collectives must not meet those of the training loop.
        # Who is done with its bytes waits for the others, who beat as long as they move theirs: no matter how many.
        self._group = dist.new_group(backend="gloo", timeout=max(_BACKSTOP, timedelta(seconds=world.patience_s)))
        pinned = world.device.type == "cuda"
        self._staging = StagingOptions(pinned, False, False, pinned)
        self._stager: DefaultStager | None = None
        self.damaged: list[CheckpointSetAside] = []
        """Checkpoints that `restore` set aside, on rank 0."""
        self._asynchronous = config.asynchronous if pinned else bool(config.asynchronous)
        """None until host memory has been looked at."""
        self._copies: LocalCopies | None = None
        if config.local and (directory := os.environ.get(LOCAL_CHECKPOINTS)):
            self._copies = LocalCopies(Path(directory), world, _BACKSTOP)

    def require_owned(self) -> None:
        """Raise TakenOverError if a newer attempt owns the run: then nothing may be written for this one."""
        require_newest(self._run_dir, self._attempt)

    def after(self, step: int, learner: Learner, timer: PhaseTimer) -> None:
        """Commit what has been written meanwhile, and save `step` if it is one of the interval.

        A full disk is waited for. What there was no space for in the background is made good by saving `step`.

        Raises:
            RankError: the disk or the orchestrator failed; earlier checkpoints are intact.
        """
        due = step % self._config.interval == 0
        if self._writing is not None and self._world.decide(int(self._writing.done.done())):
            due = not self._concluded(timer) or due
        if due:
            self._save(step, learner, timer)

    def finish(self, step: int, learner: Learner, timer: PhaseTimer) -> None:
        """Save `step` unless that has been done, and return when everything is committed. The last call.

        Raises:
            RankError: as from `after`.
        """
        if self._copies is not None:
            self._copies.close()  # nobody starts again from the last one
            self._copies = None
        if step > self._saved:
            self._save(step, learner, timer)
        while not self._concluded(timer):
            self._save(step, learner, timer)
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()

    def restore(self, learner: Learner) -> int:
        """Load the newest sound checkpoint. Returns its step, or 0 if there is none.

        A checkpoint that is proven to be damaged is renamed to `*.damaged-<attempt>`, so that every process agrees on
        which is the newest. The newest is announced again: who committed it may have been killed before.

        Raises:
            RankError: the orchestrator failed, a newer attempt owns the run, or a committed checkpoint is not visible
                from a rank's node.
        """
        self._on_main(self.require_owned, "restoring a checkpoint")
        half_loaded = False
        while step := self._newest_whole():
            damage = self._damaged_before(step)
            if not damage:
                damage = self._load(step, learner)
                half_loaded = bool(damage)
            if not damage:
                self._on_main(lambda: self._announce(step), f"resuming at step {step}")
                break
            self._on_main(partial(self._set_aside, step, damage), f"setting the checkpoint of step {step} aside")
        if half_loaded:
            raise RankError("no other checkpoint is there, and of the damaged one a part is loaded: start anew")
        self._saved = step
        return step

    def _newest_whole(self) -> int:
        """The newest one that looks whole: shards are only looked at, ranks check them while they read."""
        steps: list[int] = []

        def look() -> None:
            steps.append(checkpoints.set_damaged_aside(self._run_dir, self._attempt, self._note_damage) or 0)

        self._on_main(look, "looking for the newest checkpoint")
        return self._world.decide(steps[0] if steps else 0)

    def _set_aside(self, step: int, why: list[str]) -> None:
        path = checkpoints.set_aside(self._run_dir, step, self._attempt, why)
        self._note_damage(step, "; ".join(why), path)

    def _note_damage(self, step: int, why: str, path: Path) -> None:
        self.damaged.append(CheckpointSetAside(step, why, str(path)))

    def _damaged_before(self, step: int) -> list[str]:
        """Of a checkpoint of release 0.1.0, what is damaged: each rank reads some files, before any is loaded."""
        directory = checkpoints.step_dir(self._run_dir, step)
        shards = checkpoints.unchecked_shards(directory)
        damage: list[str] = []
        failure: Exception | None = None
        try:
            for record in shards[self._world.rank :: self._world.size]:
                liveness().heartbeat()
                damage += checkpoints.proven_differences(directory, [record])
        except OSError as error:
            failure = error
        self._world.agree(failure, f"reading the checkpoint of step {step}")
        return [text for texts in self._world.collect(damage) for text in texts]

    def _load(self, step: int, learner: Learner) -> list[str]:
        """Load a checkpoint; what of it is damaged, in words. Raises RankError: it cannot be read."""
        moved = Moved()
        directory = checkpoints.step_dir(self._run_dir, step) / "trainer"
        reader = ShardReader(directory, moved, threads_of_a_rank(), self._copies_of(step))
        try:
            dcp.load(_state(learner), storage_reader=reader, planner=StatePlanner(), process_group=self._group)
        except CheckpointException as error:
            failures = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
            damage = [str(each) for each in failures.values() if isinstance(each, DamagedShardError)]
            if not damage:
                texts = "; ".join(f"rank {rank}: {each!r}" for rank, each in failures.items())
                raise RankError(f"reading the checkpoint of step {step} failed: {texts}") from error
            return sorted(set(damage))
        if self._copies is not None:
            near = reader.bytes_of_copies / max(1, moved.bytes)
            log.info("step %d: %.1f %% of %.3f GB read from copies on this node", step, 100 * near, moved.bytes / 1e9)
        return []

    def _copies_of(self, step: int) -> dict[str, Path]:
        """Where copies of a checkpoint's files are on this node."""
        if self._copies is None:
            return {}
        return self._copies.recover(step, self._world.share(checkpoints.shard_sizes(self._run_dir, step)))

    def _save(self, step: int, learner: Learner, timer: PhaseTimer) -> None:
        self._concluded(timer)  # if there was no space for an earlier step, this one takes its place
        directory = checkpoints.step_dir(self._run_dir, step)

        def save() -> None:
            self._begin_save(step, learner, timer)

        waiting_for_space(self._world, self._run_dir, save, directory, pause_s=self._pause_s)

    def _begin_save(self, step: int, learner: Learner, timer: PhaseTimer) -> None:
        directory = checkpoints.step_dir(self._run_dir, step)
        began = time.monotonic()
        with timer.phase("snapshot"):
            self._on_main(lambda: self._begin(directory, step, timer.journal), f"checkpoint of step {step}")
            state = {name: part.state_dict() for name, part in _state(learner).items()}
            if self._asynchronous is None:
                self._asynchronous = copies_fit(self._world, state)
            if self._asynchronous and self._stager is None:
                self._stager = DefaultStager(self._staging)
            moved = Moved()
            rounded = _MOMENTS if self._config.moments == "bfloat16" else ()
            copies = self._copies.begin(step) if self._copies else None
            writer = ShardWriter(directory / "trainer", moved, threads_of_a_rank(), rounded, copies)
            where: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
            write: Callable[[], object]
            if self._stager is None:
                write = partial(dcp.save, state, **where)
            else:
                write = cast(Future[Any], dcp.async_save(state, **where, async_stager=self._stager)).result
        self._writing = _Writing(step, began, moved, self._thread.submit(self._write, write, writer, directory, step))
        self._saved = step
        if self._stager is None:
            self._conclude(timer)

    def _begin(self, directory: Path, step: int, journal: Journal) -> None:
        """The orchestrator's part comes first, while its state is that of `step`. It flushes its records, too."""
        self.require_owned()
        checkpoints.clear(directory)
        journal.sync()
        if self._link is not None:
            self._link.save(step, str(directory))
        else:
            metrics.sync(self._run_dir)

    def _write(self, write: Callable[[], object], writer: ShardWriter, directory: Path, step: int) -> None:
        write()
        if self._world.is_main:
            self.require_owned()
            checkpoints.commit(directory, step, self._attempt, writer.files)

    def _concluded(self, timer: PhaseTimer) -> bool:
        """`_conclude`, and whether there was space for what was being written; if not, nothing is left of it."""
        writing = self._writing
        try:
            self._conclude(timer)
        except RankError as error:
            full = for_want_of_space(self._world, self._run_dir, error)
            self._lost += not full
            if writing is None or not (full or (is_away(self._world, error) and self._lost < MOST_TRIES)):
                raise
            log.warning("step %d is not saved: %s", writing.step, error)
            if self._world.is_main:
                files.remove_tree(checkpoints.step_dir(self._run_dir, writing.step), ignore_errors=True)
            return False
        self._lost = 0
        return True

    def _conclude(self, timer: PhaseTimer) -> None:
        """Wait for the checkpoint that is being written, if any, and tell everyone that it is committed."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        doing = f"checkpoint of step {writing.step}"
        with timer.phase("checkpoint"):
            wait_with_heartbeats([writing.done], writing.moved)
            self._world.agree(_failure(writing.done), doing)
            self._on_main(lambda: self._announce(writing.step), doing)
            if self._copies is not None:
                self._copies.replicate(writing.step)
        timer.took("checkpoint", time.monotonic() - writing.began)
        timer.journal.write(CheckpointCommitted(writing.step))

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


class _Trained:
    """What of a model a checkpoint holds: not what is frozen, which stays as the model's files have it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Buffers and trained parameters."""
        state = self._model.state_dict(keep_vars=True)
        return {n: t.detach() for n, t in state.items() if t.requires_grad or not isinstance(t, torch.nn.Parameter)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; DCP has made sure that it is complete."""
        self._model.load_state_dict(state, strict=False)


def _state(learner: Learner) -> dict[str, Stateful]:
    return {"model": _Trained(learner.policy.model), "optimizer": learner.optimizer, "scheduler": learner.scheduler}


def _failure(done: Future[None]) -> OSError | None:
    """Wait for a write; what went wrong, if anything did."""
    try:
        done.result()
    except (CheckpointException, OSError) as error:  # the former is no Exception, and comes on every rank
        return OSError(str(error))
    return None

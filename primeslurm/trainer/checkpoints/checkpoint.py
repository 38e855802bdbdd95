"""Checkpoints: DCP directories that any number of ranks can load, committed together with the orchestrator."""

from __future__ import annotations

import logging
import shutil
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

from primeslurm import durable
from primeslurm.recipe.sections.trainer import Checkpoint
from primeslurm.records import metrics
from primeslurm.records.events.training import CheckpointCommitted
from primeslurm.records.journal import Journal
from primeslurm.trainer.distributed.space import for_want_of_space, waiting_for_space
from primeslurm.trainer.distributed.world import RankError, World
from primeslurm.trainer.loops.phase_timer import PhaseTimer
from primeslurm.trainer.loops.step import Learner
from primeslurm.wire import checkpoints
from primeslurm.wire.link import LinkError, TrainerLink

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Writing:
    """A checkpoint on its way to the disk."""

    step: int
    began: float
    done: Future[None]
    """On rank 0 it includes COMMITTED, which waits for every rank's files."""


class Checkpoints:
    """Saves, commits and restores one run's checkpoints. All ranks call each method together.

    If asynchronous, a checkpoint is copied to host memory, and training goes on while a thread writes the copy. One is
    written at a time: the next one waits.

    Args:
        link: to the orchestrator, which adds its part to each checkpoint; None for a task without one.
    """

    def __init__(self, run_dir: Path, attempt: int, config: Checkpoint, world: World, link: TrainerLink | None) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._config = config
        self._world = world
        self._link = link
        self._saved = 0
        self._writing: _Writing | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # A group of its own: the thread's collectives must not meet those of the training loop.
        patience = timedelta(seconds=world.patience_s)
        self._group = dist.new_group(backend="gloo", timeout=patience) if config.asynchronous else world.control
        pinned = world.device.type == "cuda"
        self._stager = DefaultStager(StagingOptions(pinned, False, False, pinned)) if config.asynchronous else None

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
        if step > self._saved:
            self._save(step, learner, timer)
        while not self._concluded(timer):
            self._save(step, learner, timer)
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()

    def restore(self, learner: Learner) -> int:
        """Load the newest sound checkpoint. Returns its step, or 0 if there is none.

        A damaged one is renamed to `*.damaged-<attempt>`, so that every process agrees on what is the newest. It is
        announced again: who committed it may have been killed before.

        Raises:
            RankError: the orchestrator failed.
        """
        step = self._world.decide(self._newest_sound() if self._world.is_main else 0)
        if step:
            directory = checkpoints.step_dir(self._run_dir, step) / "trainer"
            dcp.load(_state(learner), checkpoint_id=directory, process_group=self._world.control)
            self._on_main(lambda: self._announce(step), f"resuming at step {step}")
        self._saved = step
        return step

    def _newest_sound(self) -> int:
        for step in reversed(checkpoints.committed(self._run_dir)):
            directory = checkpoints.step_dir(self._run_dir, step)
            damage = checkpoints.damage(directory)
            if not damage:
                return step
            log.error("checkpoint of step %d is damaged, trying the one before: %s", step, "; ".join(damage))
            durable.rename(directory, directory.with_name(f"{directory.name}.damaged-{self._attempt}"))
        return 0

    def _save(self, step: int, learner: Learner, timer: PhaseTimer) -> None:
        self._concluded(timer)  # if there was no space for an earlier step, this one takes its place
        directory = checkpoints.step_dir(self._run_dir, step)
        waiting_for_space(self._world, self._run_dir, lambda: self._begin_save(step, learner, timer), directory)

    def _begin_save(self, step: int, learner: Learner, timer: PhaseTimer) -> None:
        directory = checkpoints.step_dir(self._run_dir, step)
        began = time.monotonic()
        with timer.phase("snapshot"):
            self._on_main(lambda: self._begin(directory, step, timer.journal), f"checkpoint of step {step}")
            state = {name: part.state_dict() for name, part in _state(learner).items()}
            where: dict[str, Any] = {"checkpoint_id": directory / "trainer", "process_group": self._group}
            write: Callable[[], object]
            if self._stager is None:
                write = partial(dcp.save, state, **where)
            else:
                write = cast(Future[Any], dcp.async_save(state, **where, async_stager=self._stager)).result
        self._writing = _Writing(step, began, self._thread.submit(self._write, write, directory, step))
        self._saved = step
        if self._stager is None:
            self._conclude(timer)

    def _begin(self, directory: Path, step: int, journal: Journal) -> None:
        """The orchestrator's part comes first, while its state is that of `step`. It flushes its records, too."""
        _clear(directory)
        journal.sync()
        if self._link is not None:
            self._link.save(step, str(directory))
        else:
            metrics.sync(self._run_dir)

    def _write(self, write: Callable[[], object], directory: Path, step: int) -> None:
        write()
        if self._world.is_main:
            checkpoints.commit(directory, step, self._attempt)

    def _concluded(self, timer: PhaseTimer) -> bool:
        """`_conclude`, and whether there was space for what was being written; if not, nothing is left of it."""
        writing = self._writing
        try:
            self._conclude(timer)
        except RankError as error:
            if writing is None or not for_want_of_space(self._world, self._run_dir, error):
                raise
            log.warning("step %d is not saved: %s", writing.step, error)
            if self._world.is_main:
                shutil.rmtree(checkpoints.step_dir(self._run_dir, writing.step), ignore_errors=True)
            return False
        return True

    def _conclude(self, timer: PhaseTimer) -> None:
        """Wait for the checkpoint that is being written, if any, and tell everyone that it is committed."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        doing = f"checkpoint of step {writing.step}"
        with timer.phase("checkpoint"):
            self._world.agree(_failure(writing.done), doing)
            self._on_main(lambda: self._announce(writing.step), doing)
        timer.took("checkpoint", time.monotonic() - writing.began)
        timer.journal.write(CheckpointCommitted(writing.step))

    def _announce(self, step: int) -> None:
        needed = self._link.committed(step) if self._link is not None else []
        checkpoints.prune(self._run_dir, self._config.keep, needed)

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


def _state(learner: Learner) -> dict[str, Any]:
    return {"model": _Trained(learner.policy.model), "optimizer": learner.optimizer, "scheduler": learner.scheduler}


def _failure(done: Future[None]) -> OSError | None:
    """Wait for a write; what went wrong, if anything did."""
    try:
        done.result()
    except (CheckpointException, OSError) as error:  # the former is no Exception, and comes on every rank
        return OSError(str(error))
    return None


def _clear(directory: Path) -> None:
    """Remove what an earlier attempt left; COMMITTED first, so that a half-deleted checkpoint does not look sound."""
    durable.remove(directory / checkpoints.COMMITTED)
    if directory.exists():
        shutil.rmtree(directory)
    durable.make_directory(directory)

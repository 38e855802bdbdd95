"""Checkpoints: DCP directories that any number of ranks can load, committed together with the orchestrator."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from primeslurm.trainer import compat  # noqa: F401  isort: skip  (before torchtitan)
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from primeslurm.recipe.training import Checkpoint
from primeslurm.trainer.step import Learner
from primeslurm.trainer.world import RankError, World
from primeslurm.wire import checkpoints
from primeslurm.wire.link import LinkError, TrainerLink

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves, commits and restores one run's checkpoints. All ranks call each method together.

    Args:
        link: to the orchestrator, which adds its part to each checkpoint; None for a task without one.
    """

    def __init__(self, run_dir: Path, attempt: int, config: Checkpoint, world: World, link: TrainerLink | None) -> None:
        self.last = 0
        """The last committed step; 0 if there is none."""
        self._run_dir = run_dir
        self._attempt = attempt
        self._config = config
        self._world = world
        self._link = link

    def due(self, step: int, max_steps: int) -> bool:
        """Whether `step` is one to save."""
        return step % self._config.interval == 0 or step == max_steps

    def save(self, step: int, learner: Learner) -> None:
        """Save and commit `step`, then delete what is beyond `keep`.

        Raises:
            RankError: the disk or the orchestrator failed; earlier checkpoints are intact.
        """
        directory = checkpoints.step_dir(self._run_dir, step)
        self._on_main(lambda: _clear(directory), f"checkpoint of step {step}")
        try:
            dcp.save(_state(learner), checkpoint_id=directory / "trainer", process_group=self._world.control)
        except CheckpointException as error:  # a BaseException, raised on every rank
            raise RankError(f"checkpoint of step {step} failed: {error}") from error
        self._on_main(lambda: self._commit(directory, step), f"commit of step {step}")
        self.last = step

    def restore(self, learner: Learner) -> int:
        """Load the newest sound checkpoint. Returns its step, or 0 if there is none.

        A damaged one is renamed to `*.damaged-<attempt>`, so that every process agrees on what is the newest.
        """
        step = self._world.decide(self._newest_sound() if self._world.is_main else 0)
        if step:
            directory = checkpoints.step_dir(self._run_dir, step) / "trainer"
            dcp.load(_state(learner), checkpoint_id=directory, process_group=self._world.control)
        self.last = step
        return step

    def _newest_sound(self) -> int:
        for step in reversed(checkpoints.committed(self._run_dir)):
            directory = checkpoints.step_dir(self._run_dir, step)
            damage = checkpoints.damage(directory)
            if not damage:
                return step
            log.error("checkpoint of step %d is damaged, trying the one before: %s", step, "; ".join(damage))
            directory.rename(directory.with_name(f"{directory.name}.damaged-{self._attempt}"))
        return 0

    def _commit(self, directory: Path, step: int) -> None:
        if self._link is not None:
            self._link.save(step, str(directory))
        checkpoints.commit(directory, step, self._attempt)
        if self._link is not None:
            self._link.committed(step)
        checkpoints.prune(self._run_dir, self._config.keep)

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


def _clear(directory: Path) -> None:
    """Remove what an earlier attempt left; COMMITTED first, so that a half-deleted checkpoint does not look sound."""
    (directory / checkpoints.COMMITTED).unlink(missing_ok=True)
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)

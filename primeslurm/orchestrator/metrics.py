"""Metrics of each step: metrics.jsonl, TensorBoard, and Weights & Biases when configured."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from primeslurm.files import write_atomic
from primeslurm.orchestrator.groups import Group
from primeslurm.recipe import Recipe
from primeslurm.wire.rollouts import Rollout

Row = dict[str, float]


def batch_metrics(groups: Sequence[Group], step: int, seq_len: int) -> Row:
    """What a batch says about itself. Staleness is in policy versions: step s trains version s-1."""
    rewards = np.array([reward for group in groups for reward in group.rewards])
    branches = [branch for group in groups for rollout in group.rollouts for branch in rollout]
    staleness = np.array([step - 1 - group.opened_version for group in groups])
    age = np.array([step - 1 - branch.oldest_version for branch in branches])
    lengths = np.array([len(branch.token_ids) for branch in branches])
    sampled = np.array([int(branch.mask.sum()) for branch in branches])
    row = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "staleness/mean": staleness.mean(),
        "staleness/max": staleness.max(),
        "staleness/oldest_token_max": age.max(),
        "rollouts/mixed_version": sum(branch.is_mixed for branch in branches),
        "rollouts/length_mean": lengths.mean(),
        "rollouts/sampled_mean": sampled.mean(),
        "rollouts/cut_off": np.mean([branch.info.finish_reason == "length" for branch in branches]),
        "rollouts/longer_than_seq_len": np.mean(lengths > seq_len),
        "rollouts/turns_mean": np.mean([branch.info.turns for branch in branches]),
        "rollouts/seconds_mean": np.mean([branch.info.seconds for branch in branches]),
        "groups/zero_signal": np.mean([not group.has_signal for group in groups]),
        **_by_environment(groups),
        **_distance(branches),
    }
    return {name: float(value) for name, value in row.items()}


def _distance(branches: Sequence[Rollout]) -> Row:
    """teacher/kl: mean of log p_engine - log p_teacher over sampled tokens, an estimate of KL(policy || teacher)."""
    asked = [(branch, branch.ref_logprobs) for branch in branches if branch.ref_logprobs is not None]
    gaps = [(branch.logprobs - ref)[branch.mask] for branch, ref in asked]
    return {"teacher/kl": float(np.concatenate(gaps).mean())} if gaps else {}


def _by_environment(groups: Sequence[Group]) -> Row:
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for rollout in group.rollouts:
            info = rollout[0].info
            values[f"{group.environment}/reward"].append(info.reward)
            for name, value in info.metrics.items():
                values[f"{group.environment}/{name}"].append(value)
    return {name: float(np.mean(items)) for name, items in values.items()}


class MetricsLog:
    """One row per step.

    Args:
        run_dir: of the run; rows of steps after `resumed_step` were written by an abandoned attempt and are removed.
        resumed_step: the last step that counts as trained.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, resumed_step: int) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._last = _truncate(self._path, resumed_step)
        self._board = EventFileWriter(str(run_dir / "tensorboard")) if recipe.monitor.tensorboard else None
        self._wandb = _wandb(recipe, run_dir) if recipe.monitor.wandb else None

    def write(self, step: int, row: Row) -> None:
        """Add the row of a step; a step that has one is ignored. A full disk raises OSError."""
        if step <= self._last:
            return
        self._last = step
        now = time.time()
        with self._path.open("a") as handle:
            handle.write(json.dumps({"step": step, "time": now, **row}) + "\n")
        if self._board is not None:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in row.items()])
            self._board.add_event(Event(wall_time=now, step=step, summary=summary))
            self._board.flush()
        if self._wandb is not None:
            self._wandb.log(row, step=step)

    def close(self) -> None:
        """Flush and close."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _truncate(path: Path, step: int) -> int:
    if not path.exists():
        return 0
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the writer was killed in the middle of its last line
        if row["step"] <= step:
            kept.append((row["step"], line))
    write_atomic(path, "".join(f"{line}\n" for _, line in kept))
    return max((number for number, _ in kept), default=0)


def _wandb(recipe: Recipe, run_dir: Path) -> Any:
    import wandb

    settings = recipe.monitor.wandb
    assert settings is not None
    return wandb.init(
        project=settings.project,
        entity=settings.entity,
        mode=settings.mode,
        name=recipe.name,
        id=recipe.name,
        resume="allow",
        dir=run_dir,
        config=recipe.model_dump(mode="json", by_alias=True),
    )

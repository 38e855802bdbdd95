"""One rank of a layout test: train on synthetic batches, and print the metrics as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path

from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import World, count_collectives, join
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from tests.trainer.conftest import finish, make_batch, make_timer, printed, start_ranks


def train(recipe: Recipe, out: Path, world: World) -> list[dict[str, float]]:
    import torch

    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    timer = make_timer(out)
    metrics = []
    for step in range(1, recipe.max_steps + 1):
        routed = recipe.trainer.router_replay
        batch = make_batch(step, policy.dp_rank, policy.dp_world, seq_len=recipe.seq_len, routed=routed)
        before = count_collectives()
        metrics.append(train_step.train(batch, timer))
        metrics[-1]["collectives"] = count_collectives() - before
    Publisher(policy, out, Encoding(torch.float32), 1, world).publish(recipe.max_steps)
    return metrics


def train_on_ranks(size: int, runs: Mapping[Path, Recipe]) -> list[list[list[dict[str, float]]]]:
    """Train recipes, by output directory, one after the other. Return the metrics of each step by run and rank."""
    arguments = []
    for out, recipe in runs.items():
        out.mkdir(parents=True, exist_ok=True)
        (out / "recipe.json").write_text(recipe.model_dump_json(by_alias=True))
        arguments += [str(out / "recipe.json"), str(out)]
    by_rank = [printed(output, "METRICS") for output in finish(start_ranks(size, "tests.trainer.ranks", *arguments))]
    ends = accumulate((recipe.max_steps for recipe in runs.values()), initial=0)
    assert {len(metrics) for metrics in by_rank} == {sum(recipe.max_steps for recipe in runs.values())}
    return [[metrics[begin:end] for metrics in by_rank] for begin, end in pairwise(ends)]


def main() -> None:
    """Arguments: pairs of a recipe and an output directory."""
    world = join(Interrupt(), timeout_s=600)
    for recipe, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        for metrics in train(Recipe.model_validate_json(Path(recipe).read_text()), Path(out), world):
            print("METRICS", json.dumps(metrics), flush=True)
    world.close()


if __name__ == "__main__":
    main()

"""One rank that counts FSDP's traffic in a step of several micro batches, for each way to reduce gradients."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import World, join
from primeslurm.trainer.policy.train_step import TrainStep
from tests.trainer.conftest import SEQ_LEN, make_batch, make_recipe, make_timer

MICRO_BATCHES = 8
WAYS: list[dict[str, Any]] = [
    {},
    {"gradient_dtype": "bfloat16"},
    {"reduce_gradients": "step"},
    {"reduce_gradients": "step", "gradient_dtype": "bfloat16"},
    {"reduce_gradients": "step", "reshard_after_forward": False},
]


def counted(parallelism: dict[str, Any], model: Path, world: World) -> dict[str, Any]:
    """Return the bytes of gradients and weights in collectives, the gradient norm, and the model size."""
    trainer = {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": SEQ_LEN, "parallelism": parallelism}
    recipe = make_recipe(model, trainer=trainer)
    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    batch = make_batch(1, policy.dp_rank, policy.dp_world, rows=MICRO_BATCHES * policy.dp_world)
    sent: Counter[str] = Counter()
    reduce, gather = dist.reduce_scatter_single, dist.all_gather_single

    def reducing(**arguments: Any) -> Any:
        sent["reduced"] += arguments["input"].nbytes
        return reduce(**arguments)

    def gathering(output: torch.Tensor, part: torch.Tensor, **more: Any) -> Any:
        sent["gathered"] += output.nbytes
        return gather(output, part, **more)

    with patch.object(dist, "reduce_scatter_single", reducing), patch.object(dist, "all_gather_single", gathering):
        metrics = train_step.train(batch, make_timer(model.parent / f"rank-{world.rank}"))
    split = sum(p.numel() for p in policy.model.parameters() if isinstance(p, DTensor))
    return {**sent, "parameters": split, "grad_norm": metrics["grad_norm"]}


def main() -> None:
    world = join(Interrupt(), timeout_s=600)
    for way in WAYS:
        print("COUNTED", json.dumps(counted(way, Path(sys.argv[1]), world)), flush=True)
    world.close()


if __name__ == "__main__":
    main()

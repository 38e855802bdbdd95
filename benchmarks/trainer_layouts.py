"""The trainer of a recipe at full size, rank by rank: whether all shards fit together, and their memory.

Needs no GPU: it uses fake process groups and tensors without memory (`benchmarks.support.meta_rank`). Prints a
line of JSON per recipe: problems, bytes of a rank's states and their difference from the planner's prediction, and the
bytes that it sends.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import layout_faults
from benchmarks.support.meta_rank import config_of, fake_rank
from primeslurm.models.hf_config import shape_of
from primeslurm.plan.placement.resources import resource_requests
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site

SITE = Path(__file__).resolve().parents[1] / "sites" / "h200.yaml"
ENGINE_RANKS = 8


def trainer_gpus(recipe: Recipe) -> int:
    requests = resource_requests(recipe, load_site(SITE))
    return sum(request.nodes * request.gpus for request in requests if request.role == "train")


def measure(name: str, recipe: Recipe, layers: int | None, asked: Sequence[int] | None) -> dict[str, Any]:
    """Inspect ranks of a recipe, each in a separate process.

    Args:
        recipe: a recipe whose model is in the catalogue of known ones.
        layers: number of first layers to keep; None for all.
    """
    size, config = trainer_gpus(recipe), config_of(recipe.model.path, layers)
    numbers = range(size) if asked is None else sorted({number % size for number in asked})
    expected = layout_faults.predicted(recipe, shape_of(config), size)
    shares = [_alone(partial(_share, recipe, config, size, number)) for number in numbers]
    faults = [f"rank {share.rank}: {fault}" for share in shares for fault in share.faults]
    if len(shares) == size:
        faults += layout_faults.together(shares, ENGINE_RANKS)
    off = [layout_faults.apart(share, expected) for share in shares]
    return {
        "recipe": name,
        "ranks": size,
        "looked_at": len(shares),
        "layers": layers or "all",
        "faults": faults,
        "states_gb": round(max(s.weights + s.gradients + s.optimizer for s in shares) / 1e9, 2),
        "planned_gb": round(sum(expected.values()) / 1e9, 2),
        "apart": {part: max((each[part] for each in off), key=abs) for part in expected},
        "saved_tensors": max(share.saved for share in shares),
        "sent_gb": [round(pick(share.sent for share in shares) / 1e9, 2) for pick in (min, max)],
        "cpu_s": round(max(share.seconds for share in shares), 1),
    }


def _alone(look: Callable[[], layout_faults.Share]) -> layout_faults.Share:
    """Run in a separate process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(look)


def _share(recipe: Recipe, config: dict[str, Any], size: int, number: int) -> layout_faults.Share:
    return layout_faults.share_of(fake_rank(recipe, config, number, size))


def main(words: list[str]) -> None:
    """Inspect the recipes PATH or PATH:LAYERS:RANKS, with commas between ranks (-1 is the last)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks trainer_layouts", description=__doc__)
    parser.add_argument("recipe", nargs="+", help="PATH, or PATH:LAYERS:RANKS; all layers and ranks where one is empty")
    logging.getLogger("torchtitan").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    for asked in parser.parse_args(words).recipe:
        path, layers, ranks = [*asked.split(":"), "", ""][:3]
        numbers = [int(number) for number in ranks.split(",")] if ranks else None
        found = measure(Path(path).stem, load_recipe(Path(path)), int(layers) if layers else None, numbers)
        print(json.dumps(found), flush=True)

"""Orchestrator cost of filters, difficulty pools and batch selection at the size of long agentic runs.

256 rollouts of 131,072 tokens, half of them sampled, in groups of 16, pass all filters. 100,000 examples are drawn and
recorded once each, and the record is read back. A batch of 256 is selected from 512 waiting rollouts. All times are CPU
times. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from primeslurm.orchestrator.algorithms import Grpo
from primeslurm.orchestrator.batching.group_filter import has_advantage, rollout_filters, sift
from primeslurm.orchestrator.dispatch import group_id
from primeslurm.orchestrator.dispatch.curricula import Curricula
from primeslurm.orchestrator.dispatch.limits import choose
from primeslurm.orchestrator.pipeline.progress import RunProgress
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo

TOKENS = 131_072
GROUP, GROUPS = 16, 16
EXAMPLES = 100_000
FILTERS = ("truncated", "length", "repetition", "gibberish")
RECIPE = Recipe.model_validate(
    {
        "name": "selection",
        "seq_len": TOKENS,
        "model": {"path": "/none"},
        "environments": [{"id": "e", "curriculum": {}}],
        "orchestrator": {"filters": [{"type": name} for name in FILTERS]},
    }
)


def main(words: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m benchmarks batch_selection", description=__doc__).parse_args(words)
    with tempfile.TemporaryDirectory() as directory:
        found = {
            "machine": platform.processor() or platform.machine(),
            **_filters(),
            **asyncio.run(_pools(Path(directory))),
        }
    print(json.dumps({**found, **_choice()}, indent=2))


def _filters() -> dict[str, float]:
    rng = np.random.default_rng(0)
    group = RolloutGroup("e-0", "e", 0, 0, tuple((_rollout(rng, index % 2),) for index in range(GROUP)))
    filters = rollout_filters(RECIPE.orchestrator.filters, "/none")
    started = time.process_time()
    for _ in range(GROUPS):
        kept = sift(group, filters).rest
        assert kept is not None and has_advantage(kept, Grpo(), TOKENS)
    return {"filters_ms_per_batch": round(1e3 * (time.process_time() - started), 1)}


def _rollout(rng: np.random.Generator, reward: float) -> Rollout:
    mask = np.arange(TOKENS) // 1024 % 2 == 1
    return Rollout(
        RolloutInfo("r", "e-0", "e", 0, reward),
        rng.integers(0, 100_000, TOKENS).astype(np.int32),
        mask,
        np.where(mask, -rng.exponential(0.5, TOKENS), 0).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32),
    )


async def _pools(directory: Path) -> dict[str, float]:
    made = Curricula(RECIPE, directory / "outcomes")
    made.set_tasks({"e": EXAMPLES})
    (sequence,) = (_rollout(np.random.default_rng(0), 1.0),)
    started = time.process_time()
    for position in range(EXAMPLES):
        task = made.draw("e", position, ())
        made.learn(RolloutGroup(group_id("e", position), "e", position, 0, ((sequence,),), task))
    each = (time.process_time() - started) / EXAMPLES
    known = await made.flush()
    for position in range(EXAMPLES, EXAMPLES + GROUPS):
        made.learn(RolloutGroup(group_id("e", position), "e", position, 0, ((sequence,),), position % EXAMPLES))
    started = time.process_time()
    after = await made.flush()
    record = msgspec.msgpack.encode(RunProgress(1, fresh=made.fresh, tasks=made.tasks, outcomes=after))
    written = time.process_time() - started
    started = time.process_time()
    Curricula(RECIPE, directory / "outcomes", after, made.fresh)
    return {
        "draw_and_learn_us": round(1e6 * each, 1),
        "file_bytes": after,
        "bytes_per_step": after - known + len(record),
        "record_ms_per_step": round(1e3 * written, 2),
        "restart_s": round(time.process_time() - started, 2),
    }


def _choice() -> dict[str, float]:
    source = random.Random(0)
    sizes = [source.choice((8, 16)) for _ in range(43)]
    started = time.process_time()
    for _ in range(100):
        assert choose(sizes, 256)
    return {"waiting_rollouts": sum(sizes), "choose_ms": round(10 * (time.process_time() - started), 3)}

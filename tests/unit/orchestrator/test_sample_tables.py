"""Tables of rollouts for monitors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.telemetry.sample_tables import LONGEST, ROWS, SampleTables
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from scripts.models import tiny_model
from tests.support.recipes import recipe_data

TOKENIZER = tiny_model.tokenizer()


def recipe(model: Path, **monitor: Any) -> Recipe:
    return Recipe.model_validate(recipe_data(model={"path": str(model)}, monitor=monitor))


def rollout(number: int, reward: float, text: str = "hello") -> tuple[Rollout, ...]:
    tokens = np.array(TOKENIZER.encode(text, add_special_tokens=False), np.int32)
    mask = np.arange(len(tokens)) > 0
    info = RolloutInfo(f"r{number}", "g", "e", 3, reward, turns=2, finish_reason="length")
    sampled = np.where(mask, 4, -1).astype(np.int32)
    return (Rollout(info, tokens, mask, np.zeros(len(tokens), np.float32), sampled),)


def group(*rollouts: tuple[Rollout, ...]) -> RolloutGroup:
    return RolloutGroup("g", "e", 0, 3, rollouts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(path)
    return path


def test_table_spans_all_rewards(model: Path) -> None:
    tables = SampleTables(recipe(model, wandb={"project": "p"}))
    groups = [group(*(rollout(i + 10 * g, i / 10 + g) for i in range(10))) for g in (1, 0)]
    table = tables.of(groups, 10)
    rewards = [row["reward"] for row in table]
    assert len(table) == ROWS and rewards == sorted(rewards) and (rewards[0], rewards[-1]) == (0.0, 1.9)
    assert {tuple(row) for row in table} == {tuple(table[0])}, "all rows have the same columns"
    first = table[0]
    assert first["text"] == TOKENIZER.decode(rollout(0, 0)[0].token_ids) and "hello" in str(first["text"])
    assert (first["staleness"], first["turns"], first["finish_reason"]) == (6, 2, "length")


def test_only_every_nth_step_has_a_table_and_none_without_a_monitor(model: Path) -> None:
    groups = [group(rollout(0, 1.0))]
    tables = SampleTables(recipe(model, wandb={"project": "p"}, sample_interval=4))
    assert [step for step in range(1, 13) if tables.of(groups, step)] == [1, 4, 8, 12]
    never = SampleTables(recipe(model, wandb={"project": "p"}, sample_interval=0))
    assert not never.of(groups, 1)
    assert not SampleTables(recipe(model)).of(groups, 1)


def test_long_texts_lose_their_middle(model: Path) -> None:
    tables = SampleTables(recipe(model, wandb={"project": "p"}))
    (row,) = tables.of([group(rollout(0, 1.0, "start " + "x" * 40_000 + " end"))], 1)
    text = str(row["text"])
    assert len(text) < LONGEST + 20 and text.startswith("start") and text.endswith("end") and "[...]" in text


def test_model_without_fast_tokenizer_has_no_text(tmp_path: Path) -> None:
    (row,) = SampleTables(recipe(tmp_path, wandb={"project": "p"})).of([group(rollout(0, 1.0))], 1)
    assert row["text"] == "" and row["reward"] == 1.0

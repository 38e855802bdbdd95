"""The examples of own algorithms and environments work with their recipes. tests/trainer tests the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from renderers.base import load_tokenizer

from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import load_recipe
from tests.support.batches import batch_of
from tests.support.cli import primeslurm
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.recipes import model_dir
from tests.support.rollouts import rollouts
from tests.support.turn_templates import CHATML, write_model
from tests.unit.orchestrator.test_packing import group

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
NAMES = ("own_algorithm", "own_environment", "own_loss")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def recipe(name: str, **changes: Any) -> Recipe:
    return load_recipe(EXAMPLES / f"{name}.yaml").model_copy(update=changes)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_of_an_example_passes_all_checks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.cli.ROOT", f"{ROOT}:{EXAMPLES}")
    model = model_dir(tmp_path)
    write_model(model, CHATML, "<|im_end|>")
    options = ["--set", f"model.path={model}", "--site", str(ROOT / "sites" / "h200.yaml")]
    result = primeslurm("check", EXAMPLES / f"{name}.yaml", *options, cwd=tmp_path)
    assert result.code == 0 and "recipe is valid. " in result.err, result.err


def test_own_algorithm_assigns_leave_one_out_advantages() -> None:
    wanted = recipe("own_algorithm")
    algorithm = algorithms.from_recipe(wanted)
    rewards = [1.0, 0.25, 0.0, 0.0]
    dull, good = group([4, 4], [0.5, 0.505]), group([5, 9, 7, 6], rewards)
    assert algorithm.rejects(dull) == "no_spread" and algorithm.rejects(good) is None
    batches = Batches(wanted, algorithm)
    batches.add(1, [good])
    batch = batch_of(batches, 1)
    assert batch is not None and batch.info.loss_tokens == 4 + 8 + 6 + 5
    (row,) = batch.rows
    advantages = {int(token): float(value) for token, value in zip(row.token_ids, row.advantages, strict=True) if value}
    exact = [np.float64(r) - np.mean(np.delete(np.array(rewards, np.float64), i)) for i, r in enumerate(rewards)]
    assert advantages == {i: pytest.approx(value, abs=1e-6) for i, value in enumerate(exact) if value}


@pytest.mark.parametrize(("reply", "reward"), [("Cold.", 1.0), ("It is cold", 1 / 3), ("It is warm", 0.2 / 3)])
async def test_own_environment_scores_replies(
    reply: str, reward: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = write_tokenizer(tmp_path)
    model = recipe("own_environment").model.model_copy(update={"path": str(tokenizer)})
    with FakeEngine(tokenizer, mistakes=0, answer=lambda prompt: reply) as engine:
        engine.version = 3
        long = {"model": model, "seq_len": 256}  # this tokenizer needs a token for each letter
        (rollout,) = await rollouts(engine, recipe("own_environment", **long))
    assert rollout.info.reward == pytest.approx(reward)
    prompt = load_tokenizer(str(tokenizer)).decode(rollout.token_ids).replace(" ", "")
    assert "Answereachquestionwithasingleword." in prompt and "Q:Whatistheoppositeofhot?" in prompt
    assert capsys.readouterr().out.startswith(r"'Q: What is the opposite of hot?\nA:' -> ")


def test_tutorial_shows_the_own_environment() -> None:
    page = (ROOT / "docs" / "tutorials" / "own-environment.md").read_text()
    code = (EXAMPLES / "own_environment.py").read_text().partition("\n")[2].strip()
    assert code in page

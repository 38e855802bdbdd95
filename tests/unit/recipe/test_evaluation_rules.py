"""Rules for the evaluation of a recipe, and values that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.base.errors import UsageError
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.recipe.rules.recipe import violations
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment
from tests.support.recipes import recipe_data, site, write_recipe


def problems(tmp_path: Path, evaluation: dict[str, Any], **changes: Any) -> list[str]:
    with pytest.raises(UsageError) as error:
        load_recipe(write_recipe(tmp_path / "r.yaml", evaluation=evaluation, **changes))
    return [str(violation) for violation in error.value.violations]


HELD_OUT = {"id": "reverse-text", "name": "held-out"}


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"environments": []}, ["evaluation.environments"]),
        ({"interval": 2}, ["evaluation.environments"]),
        (
            {"environments": [{"id": "reverse-text"}]},
            [
                "evaluation.environments = reverse-text: is also the name of a training environment "
                "(use another `name`, such as reverse-text-eval)"
            ],
        ),
        (
            {"environments": [HELD_OUT, HELD_OUT]},
            ["evaluation.environments = held-out: names must be unique (use another `name`, such as held-out-eval)"],
        ),
        ({"environments": [{**HELD_OUT, "ratio": 2.0}]}, ["evaluation.environments.0.ratio = 2.0: no such key"]),
        (
            {"environments": [{**HELD_OUT, "sampling": {"max_tokens": 128}}]},
            ["evaluation.environments.0.sampling.max_tokens = 128: leaves no room for a prompt in the engines' 128"],
        ),
        (
            {"environments": [{**HELD_OUT, "samples": 2, "sampling": {"temperature": 0}}]},
            ["evaluation.environments.0.samples = 2: all samples of an example are the same at temperature 0"],
        ),
        (
            {"environments": [{**HELD_OUT, "samples": 2}], "interval": 10, "keep_best": "held-out/pass@4"},
            [
                "evaluation.keep_best = held-out/pass@4: is not measured "
                "(use held-out/reward_mean or held-out/pass@1 or held-out/pass@2)"
            ],
        ),
        (
            {"environments": [HELD_OUT], "interval": 3, "keep_best": "held-out/reward_mean"},
            ["evaluation.interval = 3: must be a multiple of checkpoint.interval = 10"],
        ),
    ],
)
def test_each_contradiction_is_reported(tmp_path: Path, evaluation: dict[str, Any], expected: list[str]) -> None:
    found = problems(tmp_path, evaluation)
    assert len(found) == len(expected)
    for text, beginning in zip(found, expected, strict=True):
        assert text.startswith(beginning), text


def test_all_contradictions_are_reported_in_one_pass(tmp_path: Path) -> None:
    wrong = {**HELD_OUT, "samples": 2, "sampling": {"temperature": 0, "max_tokens": 500}}
    found = problems(tmp_path, {"environments": [wrong, wrong], "keep_best": "other/pass@2", "interval": 3})
    assert len(found) == 1 + 2 * 2 + 2


def test_evaluation_is_refused_for_serve(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, {"environments": [HELD_OUT]}, task="serve", environments=[])
    assert found == "evaluation = held-out: task serve evaluates nothing (leave it out, or use task: rl or eval)"


@pytest.mark.parametrize(
    ("samples", "passes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (10, (1, 2, 4, 8, 10))]
)
def test_pass_at_k_has_powers_of_two_and_all_samples(samples: int, passes: tuple[int, ...]) -> None:
    assert EvaluationEnvironment(id="x", samples=samples).passes == passes


def test_keep_best_accepts_an_interval_beyond_the_last_step(tmp_path: Path) -> None:
    evaluation = {"environments": [HELD_OUT], "interval": 50, "keep_best": "held-out/pass@1"}
    assert load_recipe(write_recipe(tmp_path / "r.yaml", evaluation=evaluation, max_steps=4))


def test_evaluation_gets_a_quarter_of_the_rollouts_in_flight(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", evaluation={"environments": [HELD_OUT]}))
    assert (recipe.max_inflight, recipe.max_evaluation_inflight) == (32, 8)


def test_evaluation_environment_has_its_own_workers(tmp_path: Path) -> None:
    evaluation = {"environments": [{**HELD_OUT, "workers": 2}]}
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", evaluation=evaluation))
    plan = derive(recipe, site(), tmp_path / "run")
    workers = [process for process in plan.processes() if process.role == "environment"]
    assert [process.name for process in workers] == [
        "environment-reverse-text-0",
        "environment-held-out-0",
        "environment-held-out-1",
    ]
    assert all(process.argv[process.argv.index("--environment") + 1] in process.name for process in workers)


def test_suggested_evaluation_uses_the_first_environment() -> None:
    environments = [{"id": "math-problems", "name": "math", "args": {"path": "/data/train.jsonl"}}]
    (missing,) = violations(Recipe.model_validate(recipe_data(task="eval", environments=environments)))
    entry = "{id: math-problems, name: math-eval, args: {path: HELD-OUT-FILE}}"
    assert missing.fix == f"add `evaluation: {{environments: [{entry}]}}`"
    fixed = yaml.safe_load(missing.fix.removeprefix("add ").strip("`"))
    assert violations(Recipe.model_validate(recipe_data(task="eval", environments=environments, **fixed))) == []

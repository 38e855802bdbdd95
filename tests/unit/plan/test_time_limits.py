"""Time limits of engine starts and trainer loading follow the bytes to read, unless the recipe sets them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from primeslurm.models.catalog import catalog
from primeslurm.plan.checks.files import model_files
from primeslurm.plan.memory.parameters import count
from primeslurm.plan.planner import Planned, RecipeFiles, make_plan, requests_of
from primeslurm.plan.time_limits import with_limits
from primeslurm.recipe import Recipe
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site

ROOT = Path(__file__).resolve().parents[3]
SITE = load_site(ROOT / "sites" / "h200.yaml")


def recipe_of(name: str, **changes: dict[str, Any]) -> Recipe:
    data = load_recipe(ROOT / "recipes" / f"{name}.yaml").model_dump(exclude_unset=True, by_alias=True)
    return Recipe.model_validate(data | {part: data.get(part, {}) | new for part, new in changes.items()})


def planned(recipe: Recipe, directory: Path) -> Planned:
    return make_plan(recipe, SITE, directory, RecipeFiles(recipe, model_files(recipe), None))


def seconds(recipe: Recipe, slow_gbytes_per_s: float = 0.2) -> tuple[int, int]:
    """Return the limits of engines and trainer. Storage has ten times the given speed."""
    assert pytest.approx(slow_gbytes_per_s) == SITE.network.storage_gbytes_per_s / 10
    requests, _ = requests_of(recipe, SITE, local=False)
    filled, _, _ = with_limits(recipe, SITE, requests, catalog()[recipe.model.path].shape, None)
    assert filled.inference.start_timeout_s and filled.trainer.long_phase_timeout_s
    return filled.inference.start_timeout_s, filled.trainer.long_phase_timeout_s


def in_minutes(size: float) -> int:
    """Return the seconds to read this many bytes at 0.2 GB/s, in whole minutes."""
    return 60 * math.ceil(size / 0.2e9 / 60)


def test_engines_that_share_experts_read_their_own_and_all_else() -> None:
    """Eight engines per node, 32 GPUs per group: each reads 8 of 256 experts; trainer nodes read 1/12 of the model."""
    p = count(catalog()["zai-org/GLM-5.1"].shape)
    node = 8 * 2 * (p.total - p.experts + p.experts / 32)
    assert seconds(recipe_of("glm5_pd")) == (3600 + in_minutes(node), 7200 + in_minutes((2 + 12) * p.total / 12))


def test_an_engine_that_may_get_any_expert_reads_all_of_them() -> None:
    filtered, _ = seconds(recipe_of("glm5_pd"))
    p = count(catalog()["zai-org/GLM-5.1"].shape)
    everything, _ = seconds(recipe_of("glm5_pd", inference={"eplb": True}))
    assert everything == 3600 + in_minutes(8 * 2 * p.total) > 5 * filtered


def test_stacks_of_experts_are_read_as_a_whole() -> None:
    p, stored = count(catalog()["openai/gpt-oss-120b"].shape), 0.53
    assert seconds(recipe_of("gpt_oss_120b"))[0] == 3600 + in_minutes(8 * stored * p.total)


def test_time_limits_of_the_recipe_are_kept() -> None:
    changed = recipe_of("glm5_pd", inference={"start_timeout_s": 60})
    assert seconds(changed)[0] == 60
    changed = changed.model_copy(update={"trainer": changed.trainer.model_copy(update={"long_phase_timeout_s": 4000})})
    assert seconds(changed) == (60, 4000)
    assert PhaseLimits.of(changed).long_s == 4000


def test_processes_are_given_their_limits_and_the_plan_shows_them(tmp_path: Path) -> None:
    recipe = recipe_of("glm5_pd")
    found = planned(recipe, tmp_path)
    plan, kept = found.plan, found.recipe
    starts, loads = seconds(recipe)
    engines = [process for process in plan.processes() if process.role in ("prefill", "decode")]
    assert {process.health.start_timeout_s for process in engines if process.health} == {starts}
    assert {process.env["VLLM_ENGINE_READY_TIMEOUT_S"] for process in engines} == {str(starts)}
    assert plan.estimate is not None
    shown = {amount.name: (amount.value, amount.how) for amount in plan.estimate.amounts}
    assert shown["engine start"] == (starts, "time limit: 1 h, plus 669 GB per node at 0.2 GB/s")
    assert shown["trainer loading"][0] == loads
    assert PhaseLimits.of(kept).long_s == loads
    ranks = [process for process in plan.processes() if process.role == "trainer"]
    heartbeats = {process.env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] for process in ranks}
    assert heartbeats == {str(round(PhaseLimits.of(kept).control_s))}


def test_unknown_model_adds_no_time() -> None:
    recipe = recipe_of("glm5_pd")
    requests, _ = requests_of(recipe, SITE, local=False)
    filled, limits = with_limits(recipe, SITE, requests, None, None)
    assert (filled.inference.start_timeout_s, filled.trainer.long_phase_timeout_s) == (3600, 7200)
    assert [limit.how for limit in limits] == [
        f"time limit: {base}, plus 0 B per node at 0.2 GB/s" for base in ("1 h", "2 h")
    ]

"""Time limits of engine starts and trainer loading follow the bytes to read, unless the recipe sets them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from primeslurm.models.catalog import catalog
from primeslurm.plan.checks.files import model_files
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.estimates.time_limits import with_limits
from primeslurm.plan.planner import Planned, RecipeFiles, requests_of, try_plan
from primeslurm.recipe import Recipe
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.recipe.site import Network
from tests.support.planning import make_plan

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
    assert shown["engine start"] == (
        starts,
        "time limit: 1 h, plus 10 x the 5 min 34 s of reading 669 GB per node at 2 GB/s",
    )
    assert shown["trainer loading"][0] == loads
    assert PhaseLimits.of(kept).long_s == loads
    ranks = [process for process in plan.processes() if process.role == "trainer"]
    heartbeats = {process.env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] for process in ranks}
    assert heartbeats == {str(round(PhaseLimits.of(kept).control_s))}


def test_unknown_model_adds_no_time() -> None:
    recipe = recipe_of("glm5_pd")
    requests, _ = requests_of(recipe, SITE, local=False)
    filled, limits, _ = with_limits(recipe, SITE, requests, None, None)
    assert (filled.inference.start_timeout_s, filled.trainer.long_phase_timeout_s) == (3600, 7200)
    assert [limit.how for limit in limits] == [
        f"time limit: {base}, because the model's shape is unknown" for base in ("1 h", "2 h")
    ]


def test_limits_of_the_run_follow_its_estimates(tmp_path: Path) -> None:
    """GLM-5 at 131,072 tokens, on a slow network and a slow file system."""
    slow = SITE.model_copy(update={"network": Network(gbps_per_gpu=5, storage_gbytes_per_s=0.2)})
    recipe = recipe_of("glm5_pd", weights={"timeout_s": None}, slurm={"time": "2-00:00:00"})
    found = make_plan(recipe, slow, tmp_path, RecipeFiles(recipe, model_files(recipe), None))
    plan, filled = found.plan, found.recipe
    assert plan.estimate is not None
    amounts = {amount.name: amount for amount in plan.estimate.amounts}
    nodes = recipe.deployment.train.nodes
    step, batch = amounts["trainer step, sequences of seq_len"], amounts["micro batch"]
    expected = {
        "stall": 1.5 * (step.most or step.value),
        "checkpoint signal": 1.5 * amounts["checkpoint"].value / nodes / 0.2,
        "weight loading": 10 * amounts["weight update"].value,
        "progress of a rank": 1.5 * batch.value,
    }
    for name, needed in expected.items():
        assert 0 <= amounts[name].value - needed < 60, f"{name}: {amounts[name]}"
        assert amounts[name].how.startswith("time limit: ")
    assert plan.stall_timeout_s == amounts["stall"].value > 1800 and plan.job.signal_s > 3600
    assert filled.weights.timeout_s == amounts["weight loading"].value > 600
    ranks = [process for process in plan.processes() if process.role == "trainer"]
    assert {process.heartbeats.hang_timeout_s for process in ranks if process.heartbeats} == {
        amounts["progress of a rank"].value
    }
    routers = [" ".join(process.argv) for process in plan.processes() if process.role == "router"]
    request = int(amounts["generation request"].value)
    assert routers and all(f"--request-timeout-secs {request}" in argv for argv in routers)
    leases = {argv for process in plan.processes() for argv in process.argv if "kv_lease_duration" in argv}
    assert leases and all(f'"kv_lease_duration": {2 * filled.weights.timeout_s}' in argv for argv in leases)


def test_last_checkpoint_gets_at_most_half_of_the_job(tmp_path: Path) -> None:
    slow = SITE.model_copy(update={"network": Network(storage_gbytes_per_s=0.02)})
    recipe = recipe_of("glm5_pd", slurm={"time": "04:00:00"})
    plan = make_plan(recipe, slow, tmp_path, RecipeFiles(recipe, model_files(recipe), None)).plan
    assert plan.job.signal_s == 2 * 3600


def test_each_limit_below_its_estimate_is_refused_once(tmp_path: Path) -> None:
    recipe = recipe_of(
        "glm5_pd",
        inference={"start_timeout_s": 60},
        trainer={"long_phase_timeout_s": 61, "hang_timeout_s": 5},
        weights={"timeout_s": 1},
        orchestrator={"stall_timeout_s": 62, "request_timeout_s": 30},
    )
    _, findings, _ = try_plan(recipe, SITE, tmp_path, RecipeFiles(recipe, model_files(recipe), None))
    levels = {finding.field: finding.level for finding in findings if finding.field.endswith("timeout_s")}
    assert levels == {
        "inference.start_timeout_s": "error",
        "trainer.long_phase_timeout_s": "error",
        "trainer.hang_timeout_s": "error",
        "weights.timeout_s": "error",
        "orchestrator.stall_timeout_s": "error",
        "orchestrator.request_timeout_s": "warning",
    }
    limited = [finding for finding in findings if finding.field in levels]
    assert len(limited) == len(levels) and all(
        "by the planner's estimate" in f.text.replace("\n", " ") for f in limited
    )
    assert all("leave it out" in finding.fix for finding in limited)
